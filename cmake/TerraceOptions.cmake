# How every target of the tree is compiled.
set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_C_STANDARD 11)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
set(CMAKE_RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/bin)
set(CMAKE_LIBRARY_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/lib)

# `./dev bundle` puts the libraries that a bare machine lacks beside the programs. The old form of the tag also
# serves the libraries' own dependencies. In a build folder the place does not exist, and nothing changes.
set(CMAKE_BUILD_RPATH "$ORIGIN/../lib/bundled")
set(CMAKE_BUILD_RPATH_USE_ORIGIN ON)
add_link_options(-Wl,--disable-new-dtags)

if(NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "" FORCE)
endif()

set(TERRACE_SANITIZER "" CACHE STRING "address, thread, fuzzer (clang: address, and what libFuzzer counts), or empty")
if(TERRACE_SANITIZER STREQUAL "address")
  add_compile_options(-fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer)
  add_link_options(-fsanitize=address,undefined)
elseif(TERRACE_SANITIZER STREQUAL "thread")
  # Fences are unknown to tsan; the code uses none, and the flag keeps gcc from warning about system headers.
  add_compile_options(-fsanitize=thread -fno-omit-frame-pointer -Wno-tsan)
  add_link_options(-fsanitize=thread)
elseif(TERRACE_SANITIZER STREQUAL "fuzzer")
  add_compile_options(-fsanitize=fuzzer-no-link,address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer)
  add_link_options(-fsanitize=address,undefined)
endif()

option(TERRACE_PARANOID "Checks that walk whole structures (the debug preset has them)" OFF)
if(TERRACE_PARANOID)
  add_compile_definitions(TERRACE_PARANOID_CHECKS)
endif()

option(TERRACE_RACECHECK "CUDA kernels order shared memory in ways that racecheck sees (slower)" OFF)
if(TERRACE_RACECHECK)
  add_compile_definitions(TERRACE_RACECHECK=1)
endif()

add_compile_options($<$<COMPILE_LANGUAGE:C,CXX>:-Wall> $<$<COMPILE_LANGUAGE:C,CXX>:-Wextra>
                    $<$<COMPILE_LANGUAGE:C,CXX>:-Werror>)
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
  # At -O3 g++ 12 finds these in its own inlined std::vector and std::string where there are none.
  add_compile_options($<$<COMPILE_LANGUAGE:CXX>:-Wno-array-bounds> $<$<COMPILE_LANGUAGE:CXX>:-Wno-stringop-overflow>
                      $<$<COMPILE_LANGUAGE:CXX>:-Wno-stringop-overread> $<$<COMPILE_LANGUAGE:CXX>:-Wno-restrict>)
  if(TERRACE_SANITIZER)  # and with its instructions in between, members of std::regex that are not set
    add_compile_options($<$<COMPILE_LANGUAGE:CXX>:-Wno-maybe-uninitialized>)
  endif()
endif()

# No object names the folder that it was compiled in: what is installed is the same wherever it was built. (Kernels are
# not installed, and ccache would not share a CUDA object between folders with the option.)
add_compile_options("$<$<COMPILE_LANGUAGE:C,CXX>:-ffile-prefix-map=${CMAKE_SOURCE_DIR}/=>")

find_program(CCACHE_PROGRAM ccache)
if(CCACHE_PROGRAM)
  set(CMAKE_C_COMPILER_LAUNCHER ${CCACHE_PROGRAM})
  set(CMAKE_CXX_COMPILER_LAUNCHER ${CCACHE_PROGRAM})
  set(CMAKE_CUDA_COMPILER_LAUNCHER ${CCACHE_PROGRAM})
endif()
