# The operators' tests. Those on the device seam run twice: on the emulated device under the label trainer, and
# on CUDA under the label gpu, where they skip without one.
function(terrace_operator_test name)
  cmake_parse_arguments(ARG "" "" "SOURCES;ENVIRONMENT" ${ARGN})
  terrace_test(${name} LABELS trainer SOURCES ${ARG_SOURCES} LINKS moe_ops moe_safetensors moe_oracle
               ENVIRONMENT GTEST_FILTER=-cuda/* ${ARG_ENVIRONMENT})
  add_test(NAME ${name}_cuda COMMAND ${name} WORKING_DIRECTORY ${PROJECT_BINARY_DIR})
  set_tests_properties(${name}_cuda PROPERTIES LABELS gpu TIMEOUT 300 ENVIRONMENT "GTEST_FILTER=cuda/*"
                       SKIP_REGULAR_EXPRESSION "\\[  SKIPPED \\]")
endfunction()

terrace_library(moe_oracle
  SOURCES ${CMAKE_CURRENT_LIST_DIR}/oracle.cpp ${CMAKE_CURRENT_LIST_DIR}/oracle_attention.cpp
          ${CMAKE_CURRENT_LIST_DIR}/oracle_dsa.cpp ${CMAKE_CURRENT_LIST_DIR}/oracle_fp8.cpp
          ${CMAKE_CURRENT_LIST_DIR}/oracle_kda.cpp ${CMAKE_CURRENT_LIST_DIR}/oracle_moe.cpp
          ${CMAKE_CURRENT_LIST_DIR}/oracle_rows.cpp
  LINKS terrace_runtime)

foreach(subject attention attnres conv dsa fp8 grouped kda loss matmul moe norm optimizer quantised rotary routing rows)
  terrace_operator_test(op_${subject}_test SOURCES ${CMAKE_CURRENT_LIST_DIR}/op_${subject}_test.cpp)
endforeach()

terrace_test(op_launch_test LABELS trainer SOURCES ${CMAKE_CURRENT_LIST_DIR}/op_launch_test.cpp
             LINKS moe_ops moe_oracle)
# Includes the conversion loops, which are compiled for AVX2.
terrace_test(op_mixed_test LABELS trainer SOURCES ${CMAKE_CURRENT_LIST_DIR}/op_mixed_test.cpp
             LINKS moe_ops moe_ops_cpu moe_oracle)
terrace_test(op_oracle_test LABELS trainer SOURCES ${CMAKE_CURRENT_LIST_DIR}/op_oracle_test.cpp LINKS moe_oracle)
terrace_test(op_parallel_test LABELS trainer SOURCES ${CMAKE_CURRENT_LIST_DIR}/op_parallel_test.cpp LINKS moe_ops_cpu)
# Instantiates the vector functions themselves, so it is compiled as the operators are.
terrace_test(op_vec_math_test LABELS trainer SOURCES ${CMAKE_CURRENT_LIST_DIR}/op_vec_math_test.cpp LINKS moe_ops_cpu)
target_compile_options(op_vec_math_test PRIVATE -O2 -march=x86-64-v3 -ffp-contract=fast -fno-math-errno)
terrace_test(safetensors_test LABELS trainer SOURCES ${CMAKE_CURRENT_LIST_DIR}/safetensors_test.cpp
             LINKS moe_safetensors)

# Golden vectors: the folder in TERRACE_GOLDEN_DIR, else the small ones of tests/golden. Also by hand with
# TERRACE_TEST_DEVICE=cuda.
set(TERRACE_GOLDEN_TEST_SOURCES
    ${CMAKE_CURRENT_LIST_DIR}/golden_test.cpp ${CMAKE_CURRENT_LIST_DIR}/golden_attnres.cpp
    ${CMAKE_CURRENT_LIST_DIR}/golden_file.cpp
    ${CMAKE_CURRENT_LIST_DIR}/golden_latent_moe.cpp)
terrace_test(terrace_golden_test LABELS trainer SOURCES ${TERRACE_GOLDEN_TEST_SOURCES}
             LINKS moe_ops moe_safetensors moe_oracle)
add_test(NAME terrace_golden_test_cuda COMMAND terrace_golden_test WORKING_DIRECTORY ${PROJECT_BINARY_DIR})
set_tests_properties(terrace_golden_test_cuda PROPERTIES LABELS gpu TIMEOUT 300 ENVIRONMENT TERRACE_TEST_DEVICE=cuda
                     SKIP_REGULAR_EXPRESSION "no CUDA device on this machine")
