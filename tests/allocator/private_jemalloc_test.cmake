# A library that carries small blocks and a program that opens it late. Both stand for a user's, which knows no
# sanitizer, so the library has its sources compiled for itself.
set(carried allocator/small_blocks.cpp allocator/extent_map.cpp runtime/units.cpp runtime/result.cpp runtime/assert.cpp
            runtime/fault.cpp)
list(TRANSFORM carried PREPEND ${PROJECT_SOURCE_DIR}/)
add_library(late_library SHARED guests/late_library.cpp ${carried})
target_include_directories(late_library PRIVATE ${PROJECT_SOURCE_DIR} ${PROJECT_BINARY_DIR}/generated)
target_link_libraries(late_library PRIVATE terrace_jemalloc Threads::Threads)
add_executable(late_host guests/late_host.c)
target_link_libraries(late_host PRIVATE Threads::Threads ${CMAKE_DL_LIBS})
foreach(target late_library late_host)
  target_compile_options(${target} PRIVATE -fno-sanitize=all)
  target_link_options(${target} PRIVATE -fno-sanitize=all)
endforeach()

terrace_test(private_jemalloc_test LABELS allocator SOURCES private_jemalloc_test.cpp)
get_target_property(archive terrace_jemalloc IMPORTED_LOCATION)
target_compile_definitions(private_jemalloc_test PRIVATE TERRACE_JEMALLOC_ARCHIVE="${archive}")
add_dependencies(private_jemalloc_test late_library late_host terrace_c)
