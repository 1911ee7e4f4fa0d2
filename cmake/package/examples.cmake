# The examples against an installed Terrace: cmake -S . -B build && cmake --build build
cmake_minimum_required(VERSION 3.25)
project(terrace_examples LANGUAGES C CXX)
find_package(Terrace 0.1 REQUIRED COMPONENTS swapcore)

add_executable(quickstart quickstart/quickstart.cpp)
target_link_libraries(quickstart PRIVATE Terrace::swapcore)

add_executable(c_api c_api/main.c)
target_link_libraries(c_api PRIVATE Terrace::terrace)
