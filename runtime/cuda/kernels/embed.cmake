# Device code of the runtime, as bytes in the library: machine code for each architecture of the build, and PTX of the
# last for newer ones. The driver loads it at run time; nothing here links a CUDA library.
#
# terrace_embed_kernel(NAME OUT): compiles cuda/kernels/NAME.cu and appends to the list OUT a source that defines
# terrace::cuda::NAME_image (alignment 16). As a script, `cmake -DIN=F -DOUT=F -DNAME=N -P`, it writes that source.
if(CMAKE_SCRIPT_MODE_FILE)
  file(READ "${IN}" bytes HEX)
  string(REGEX REPLACE "(................................................................)" "\\1\n" bytes "${bytes}")
  string(REGEX REPLACE "([0-9a-f][0-9a-f])" "0x\\1," bytes "${bytes}")
  file(WRITE "${OUT}" "namespace terrace::cuda {\n"
                      "extern const unsigned char ${NAME}_image[];\n"
                      "alignas(16) const unsigned char ${NAME}_image[] = {\n${bytes}};\n"
                      "}  // namespace terrace::cuda\n")
  return()
endif()

set(TERRACE_EMBED_SCRIPT ${CMAKE_CURRENT_LIST_FILE})
function(terrace_embed_kernel name out)
  set(targets "")
  foreach(architecture IN LISTS CMAKE_CUDA_ARCHITECTURES)
    string(REGEX MATCH "^[0-9]+a?" number "${architecture}")
    if(NOT number)
      set(number 90)  # "native" and the like name no number
    endif()
    list(APPEND targets -gencode=arch=compute_${number},code=sm_${number})
  endforeach()
  list(APPEND targets -gencode=arch=compute_${number},code=compute_${number})
  list(REMOVE_DUPLICATES targets)
  set(host_compiler "")
  if(CMAKE_CUDA_HOST_COMPILER)
    set(host_compiler -ccbin ${CMAKE_CUDA_HOST_COMPILER})
  endif()
  set(source ${CMAKE_CURRENT_SOURCE_DIR}/cuda/kernels/${name}.cu)
  set(image ${CMAKE_CURRENT_BINARY_DIR}/${name}.fatbin)
  add_custom_command(
    OUTPUT ${image}
    COMMAND ${CMAKE_CUDA_COMPILER} -fatbin -O3 -std=c++20 ${targets} ${host_compiler} -I${PROJECT_SOURCE_DIR} -MD -MF
            ${image}.d -o ${image} ${source}
    DEPENDS ${source}
    DEPFILE ${image}.d
    COMMENT "Device code ${name}"
    VERBATIM)
  add_custom_command(
    OUTPUT ${image}.cpp
    COMMAND ${CMAKE_COMMAND} -DIN=${image} -DOUT=${image}.cpp -DNAME=${name} -P ${TERRACE_EMBED_SCRIPT}
    DEPENDS ${image} ${TERRACE_EMBED_SCRIPT}
    VERBATIM)
  set(${out} ${${out}} ${image}.cpp PARENT_SCOPE)
endfunction()
