# The three shapes a target takes here. Sources are listed by hand: a file that is built is named.

# Compiling at -O3 takes up to twice as long. What is no hot path says what it wants instead, behind CMake's own flag.
function(terrace_optimise level)
  foreach(target ${ARGN})
    target_compile_options(${target} PRIVATE $<$<AND:$<CONFIG:Release>,$<COMPILE_LANGUAGE:CXX>>:${level}>)
  endforeach()
endfunction()

# terrace_library(NAME SOURCES ... LINKS ...): a static library of one layer.
function(terrace_library name)
  cmake_parse_arguments(ARG "" "" "SOURCES;LINKS" ${ARGN})
  add_library(${name} STATIC ${ARG_SOURCES})
  target_include_directories(${name} PUBLIC ${PROJECT_SOURCE_DIR} ${PROJECT_BINARY_DIR}/generated)
  target_link_libraries(${name} PUBLIC ${ARG_LINKS} Threads::Threads)
  if(TERRACE_HAVE_CUDA)
    target_compile_definitions(${name} PUBLIC TERRACE_HAVE_CUDA=1)
  endif()
endfunction()

# terrace_program(NAME SOURCES ... LINKS ...)
function(terrace_program name)
  cmake_parse_arguments(ARG "" "" "SOURCES;LINKS" ${ARGN})
  add_executable(${name} ${ARG_SOURCES})
  target_include_directories(${name} PRIVATE ${PROJECT_SOURCE_DIR})
  target_link_libraries(${name} PRIVATE ${ARG_LINKS} Threads::Threads)
endfunction()

# terrace_test(NAME LABELS room [gpu] SOURCES ... LINKS ... [TIMEOUT s]): one GoogleTest program, one ctest entry,
# its working directory the build folder. Under the label gpu it skips, saying so, where there is no GPU.
function(terrace_test name)
  cmake_parse_arguments(ARG "" "TIMEOUT" "SOURCES;LINKS;LABELS;ENVIRONMENT" ${ARGN})
  if(NOT ARG_TIMEOUT)
    set(ARG_TIMEOUT 300)
  endif()
  add_executable(${name} ${ARG_SOURCES})
  target_include_directories(${name} PRIVATE ${PROJECT_SOURCE_DIR} ${PROJECT_BINARY_DIR}/generated)
  target_link_libraries(${name} PRIVATE ${ARG_LINKS} GTest::gtest GTest::gmock GTest::gtest_main Threads::Threads)
  add_test(NAME ${name} COMMAND ${name} WORKING_DIRECTORY ${PROJECT_BINARY_DIR})
  set_tests_properties(${name} PROPERTIES LABELS "${ARG_LABELS}" TIMEOUT ${ARG_TIMEOUT}
                       ENVIRONMENT "${ARG_ENVIRONMENT}")
endfunction()

# In a header, not on the command line: only the tests that ask are compiled anew in another folder.
configure_file(${PROJECT_SOURCE_DIR}/cmake/build_paths.hpp.in ${PROJECT_BINARY_DIR}/generated/build_paths.hpp @ONLY)
