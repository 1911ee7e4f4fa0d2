# What is installed, and the Debian package that cpack makes of it. Included last: it names targets of every layer.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

# Tests and benchmarks are no part of it: the target package_contents builds what is.
set(package_folder ${PROJECT_SOURCE_DIR}/cmake/package)
set(staged ${PROJECT_BINARY_DIR}/package)
set(documents ${CMAKE_INSTALL_DATADIR}/doc/terrace)

# ---------------------------------------------------------------- programs and libraries

install(TARGETS terrace terraced RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
set_target_properties(terrace_c PROPERTIES VERSION ${PROJECT_VERSION} SOVERSION ${PROJECT_VERSION_MAJOR})
install(TARGETS terrace_c terrace_preload LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})

# libterrace.a: the C interface and the layers under it in one archive, which is also what C++ programs link.
get_target_property(c_sources terrace_c SOURCES)
list(TRANSFORM c_sources PREPEND ${PROJECT_SOURCE_DIR}/hooks/)
add_library(terrace_c_archive STATIC ${c_sources})
target_link_libraries(terrace_c_archive PRIVATE terrace_swapcore)
target_compile_definitions(terrace_c_archive PRIVATE TERRACE_VERSION="${PROJECT_VERSION}")
set(archived terrace_c_archive terrace_swapcore terrace_allocator terrace_runtime terrace_base)
set(merge "create ${staged}/libterrace.a\n")
foreach(library IN LISTS archived)
  string(APPEND merge "addlib $<TARGET_FILE:${library}>\n")
endforeach()
string(APPEND merge "addlib ${jemalloc_archive}\nsave\nend\n")
file(GENERATE OUTPUT ${staged}/merge.mri CONTENT "${merge}")
add_custom_command(OUTPUT ${staged}/libterrace.a COMMAND ${CMAKE_AR} -M < ${staged}/merge.mri
                   DEPENDS ${archived} ${jemalloc_archive} ${staged}/merge.mri)
install(FILES ${staged}/libterrace.a DESTINATION ${CMAKE_INSTALL_LIBDIR})

# The PyTorch plugin, where `terrace run` looks for it (daemon/python_start.hpp).
install(DIRECTORY ${CMAKE_LIBRARY_OUTPUT_DIRECTORY}/terrace_python DESTINATION lib PATTERN __pycache__ EXCLUDE)

# ---------------------------------------------------------------- headers

# What the public headers reach, and nothing else: their paths stay those of the tree.
function(install_headers_reached)
  set(open ${ARGN})
  set(seen "")
  while(open)
    list(POP_FRONT open header)
    if(header IN_LIST seen)
      continue()
    endif()
    list(APPEND seen ${header})
    set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/${header})
    file(STRINGS ${PROJECT_SOURCE_DIR}/${header} lines REGEX "^#include \"")
    list(TRANSFORM lines REPLACE "^#include \"([^\"]+)\".*" "\\1")
    list(APPEND open ${lines})
    cmake_path(GET header PARENT_PATH folder)
    install(FILES ${PROJECT_SOURCE_DIR}/${header} DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/terrace/${folder})
  endwhile()
endfunction()
install_headers_reached(hooks/c_abi/terrace.h hooks/c_abi/terrace_stash.h swapcore/session.hpp)
install(FILES ${package_folder}/terrace.h DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/terrace)

# ---------------------------------------------------------------- find_package and pkg-config

set(cmake_destination ${CMAKE_INSTALL_LIBDIR}/cmake/Terrace)
configure_package_config_file(${package_folder}/TerraceConfig.cmake.in ${staged}/TerraceConfig.cmake
                              INSTALL_DESTINATION ${cmake_destination}
                              PATH_VARS CMAKE_INSTALL_INCLUDEDIR CMAKE_INSTALL_LIBDIR)
write_basic_package_version_file(${staged}/TerraceConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${staged}/TerraceConfig.cmake ${staged}/TerraceConfigVersion.cmake DESTINATION ${cmake_destination})

file(RELATIVE_PATH prefix_from_pc /${CMAKE_INSTALL_LIBDIR}/pkgconfig /)
foreach(name terrace terrace-swapcore)
  configure_file(${package_folder}/${name}.pc.in ${staged}/${name}.pc @ONLY)
  install(FILES ${staged}/${name}.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
endforeach()

# ---------------------------------------------------------------- manual, completions, unit, documents

find_package(Python3 REQUIRED COMPONENTS Interpreter)
find_program(GZIP gzip REQUIRED)
# printed(FILE COMMAND ... DEPENDS ...): a file that a program of ours prints; a manual page is compressed.
set(printed_files "")
function(printed file)
  cmake_parse_arguments(ARG "" "" "COMMAND;DEPENDS" ${ARGN})
  set(compress "")
  set(output ${staged}/${file})
  if(file MATCHES "\\.([158])$")
    set(compress COMMAND ${GZIP} -9nf ${staged}/${file})
    string(APPEND output .gz)
    install(FILES ${output} DESTINATION ${CMAKE_INSTALL_MANDIR}/man${CMAKE_MATCH_1})
  endif()
  add_custom_command(OUTPUT ${output} COMMAND ${ARG_COMMAND} > ${staged}/${file} ${compress} DEPENDS ${ARG_DEPENDS})
  set(printed_files ${printed_files} ${output} PARENT_SCOPE)
endfunction()
printed(terrace.1 COMMAND terrace --manual DEPENDS terrace)
printed(terraced.8 COMMAND terraced --manual DEPENDS terraced)
set(policy_manual ${PROJECT_SOURCE_DIR}/cmake/policy_manual.py ${PROJECT_SOURCE_DIR}/docs/POLICY.md)
printed(terrace.toml.5 COMMAND Python3::Interpreter ${policy_manual} DEPENDS ${policy_manual})
foreach(shell bash zsh fish)
  printed(completion.${shell} COMMAND terrace completion ${shell} DEPENDS terrace)
endforeach()
install(FILES ${staged}/completion.bash RENAME terrace DESTINATION ${CMAKE_INSTALL_DATADIR}/bash-completion/completions)
install(FILES ${staged}/completion.zsh RENAME _terrace DESTINATION ${CMAKE_INSTALL_DATADIR}/zsh/vendor-completions)
install(FILES ${staged}/completion.fish RENAME terrace.fish
        DESTINATION ${CMAKE_INSTALL_DATADIR}/fish/vendor_completions.d)

# The unit names programs by their full path, which is known when it is installed, and the policy in /etc.
install(CODE "
  set(CMAKE_INSTALL_FULL_BINDIR \"\${CMAKE_INSTALL_PREFIX}/${CMAKE_INSTALL_BINDIR}\")
  configure_file(\"${PROJECT_SOURCE_DIR}/daemon/terraced.service.in\" \"${staged}/terraced.service\" @ONLY)
  set(settings \"\${CMAKE_INSTALL_PREFIX}/etc\")
  if(CMAKE_INSTALL_PREFIX STREQUAL \"/usr\")
    set(settings /etc)
  endif()
  file(INSTALL \"${PROJECT_SOURCE_DIR}/examples/policies/defaults.toml\" DESTINATION \"\${settings}/terrace\"
       RENAME terrace.toml)")
install(FILES ${staged}/terraced.service DESTINATION lib/systemd/system)

install(DIRECTORY ${PROJECT_SOURCE_DIR}/examples/policies DESTINATION ${documents}/examples)
install(FILES ${package_folder}/examples.cmake RENAME CMakeLists.txt DESTINATION ${documents}/examples)
install(FILES ${PROJECT_SOURCE_DIR}/examples/quickstart/quickstart.cpp DESTINATION ${documents}/examples/quickstart)
install(FILES ${PROJECT_SOURCE_DIR}/examples/c_api/main.c DESTINATION ${documents}/examples/c_api)
install(DIRECTORY ${PROJECT_SOURCE_DIR}/dashboards DESTINATION ${CMAKE_INSTALL_DATADIR}/terrace PATTERN "*.py" EXCLUDE)
install(FILES ${PROJECT_SOURCE_DIR}/docs/POLICY.md ${PROJECT_SOURCE_DIR}/docs/METRICS.md DESTINATION ${documents})

add_custom_command(OUTPUT ${staged}/changelog.gz DEPENDS ${PROJECT_SOURCE_DIR}/CHANGELOG.md
                   COMMAND ${GZIP} -9nc ${PROJECT_SOURCE_DIR}/CHANGELOG.md > ${staged}/changelog.gz)
# Headers of other projects are compiled in: their terms travel along, as their packages state them.
cmake_path(GET jemalloc_archive PARENT_PATH jemalloc_libraries)
set(terms ${PROJECT_SOURCE_DIR}/LICENSE ${jemalloc_libraries}/../COPYING)
foreach(package libcli11-dev libspdlog-dev libtomlplusplus-dev nlohmann-json3-dev libxxhash-dev libfmt-dev libjs-chart.js)
  if(EXISTS /usr/share/doc/${package}/copyright)
    list(APPEND terms /usr/share/doc/${package}/copyright)
  endif()
endforeach()
add_custom_command(OUTPUT ${staged}/copyright DEPENDS ${terms}
                   COMMAND ${Python3_EXECUTABLE} ${package_folder}/terms.py ${terms} > ${staged}/copyright)
install(FILES ${staged}/changelog.gz ${staged}/copyright DESTINATION ${documents})

add_custom_target(package_contents ALL DEPENDS terrace terraced terrace_c terrace_preload terrace_python
                                           ${staged}/libterrace.a ${printed_files}
                                           ${staged}/changelog.gz ${staged}/copyright)

# ---------------------------------------------------------------- cpack

set(CMAKE_INSTALL_DEFAULT_DIRECTORY_PERMISSIONS OWNER_READ OWNER_WRITE OWNER_EXECUTE GROUP_READ GROUP_EXECUTE WORLD_READ
                                                WORLD_EXECUTE)
set(CPACK_INSTALL_DEFAULT_DIRECTORY_PERMISSIONS ${CMAKE_INSTALL_DEFAULT_DIRECTORY_PERMISSIONS})
set(CPACK_GENERATOR DEB)
set(CPACK_PACKAGE_NAME terrace)
set(CPACK_PACKAGE_CONTACT "Terrace maintainers <maintainers@terrace.invalid>")
set(CPACK_PACKAGE_DESCRIPTION_SUMMARY "Memory tiering for GPU training")
set(CPACK_PACKAGE_DESCRIPTION "Terrace lets a training process use more memory than its GPU has: host memory behind HBM,
with the right bytes moved early enough that nobody waits. This package has the node's daemon, the terrace
command, the preload library, and libterrace with its headers for C and C++.")
set(CPACK_PACKAGING_INSTALL_PREFIX /usr)
set(CPACK_STRIP_FILES ON)
set(CPACK_VERBATIM_VARIABLES ON)
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_PACKAGE_SECTION science)
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS ON)
set(CPACK_DEBIAN_PACKAGE_GENERATE_SHLIBS ON)
set(CPACK_DEBIAN_PACKAGE_CONTROL_EXTRA ${package_folder}/conffiles)
set(CPACK_DEBIAN_PACKAGE_RECOMMENDS "libhwloc-dev, libnuma-dev")  # for those who link libterrace.a
set(CPACK_DEBIAN_PACKAGE_SUGGESTS "prometheus, grafana")
include(CPack)
