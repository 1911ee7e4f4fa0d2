# The private jemalloc as target terrace_jemalloc. cmake/jemalloc.sh builds it, once a machine; ./dev setup calls that.
# The sanitizer presets use the same archive: it is not instrumented, and what matters to them, its locks, they see.
set(TERRACE_JEMALLOC_DIR "" CACHE PATH "Folder of the private jemalloc; empty: where ./dev setup built it")
set(jemalloc_script ${CMAKE_CURRENT_LIST_DIR}/jemalloc.sh)
set(jemalloc_folder "${TERRACE_JEMALLOC_DIR}")
if(NOT jemalloc_folder)
  execute_process(COMMAND bash ${jemalloc_script} where OUTPUT_VARIABLE jemalloc_folder
                  OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
endif()
set(jemalloc_archive ${jemalloc_folder}/lib/libterrace_jemalloc.a)
if(NOT EXISTS ${jemalloc_archive} OR NOT EXISTS ${jemalloc_folder}/include/terrace_jemalloc.h)
  message(FATAL_ERROR "the private jemalloc is not in ${jemalloc_folder}: run ./dev setup, which builds it, or name "
                      "its folder with -DTERRACE_JEMALLOC_DIR=...")
endif()
set_property(DIRECTORY ${PROJECT_SOURCE_DIR} APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${jemalloc_script})

add_library(terrace_jemalloc STATIC IMPORTED GLOBAL)
set_target_properties(terrace_jemalloc PROPERTIES IMPORTED_LOCATION ${jemalloc_archive}
                                                  INTERFACE_INCLUDE_DIRECTORIES ${jemalloc_folder}/include)
# A library that carries it is never unloaded: each thread that has used it runs its code once more as it ends.
target_link_options(terrace_jemalloc INTERFACE
                    $<$<IN_LIST:$<TARGET_PROPERTY:TYPE>,SHARED_LIBRARY$<SEMICOLON>MODULE_LIBRARY>:-Wl,-z,nodelete>)
