# The CUDA operators, compiled where a toolkit is found; they link CUDA::cudart_static and CUDA::cublas.
set(MOE_OPS_CUDA_SOURCES
    ${CMAKE_CURRENT_LIST_DIR}/op_call.cpp
    ${CMAKE_CURRENT_LIST_DIR}/cuda_ops.cpp
    ${CMAKE_CURRENT_LIST_DIR}/matmul.cpp
    ${CMAKE_CURRENT_LIST_DIR}/grouped_matmul.cu
    ${CMAKE_CURRENT_LIST_DIR}/grouped_hopper.cu
    ${CMAKE_CURRENT_LIST_DIR}/hopper/tensor_map.cpp
    ${CMAKE_CURRENT_LIST_DIR}/glu.cu
    ${CMAKE_CURRENT_LIST_DIR}/attention.cu
    ${CMAKE_CURRENT_LIST_DIR}/attention_general.cu
    ${CMAKE_CURRENT_LIST_DIR}/attention_hopper.cu
    ${CMAKE_CURRENT_LIST_DIR}/attention_hopper_backward.cu
    ${CMAKE_CURRENT_LIST_DIR}/attnres.cu
    ${CMAKE_CURRENT_LIST_DIR}/attnres_ring.cu
    ${CMAKE_CURRENT_LIST_DIR}/optimizer.cu
    ${CMAKE_CURRENT_LIST_DIR}/rotary.cu
    ${CMAKE_CURRENT_LIST_DIR}/rms_norm.cu
    ${CMAKE_CURRENT_LIST_DIR}/gated_rms_norm.cu
    ${CMAKE_CURRENT_LIST_DIR}/layer_norm.cu
    ${CMAKE_CURRENT_LIST_DIR}/causal_conv.cu
    ${CMAKE_CURRENT_LIST_DIR}/kda_prepare.cu
    ${CMAKE_CURRENT_LIST_DIR}/kda_forward.cu
    ${CMAKE_CURRENT_LIST_DIR}/kda_backward.cu
    ${CMAKE_CURRENT_LIST_DIR}/kda_gradients.cu
    ${CMAKE_CURRENT_LIST_DIR}/kda_widen.cu
    ${CMAKE_CURRENT_LIST_DIR}/kda_chunked.cu
    ${CMAKE_CURRENT_LIST_DIR}/kda_chunk_prepare.cu
    ${CMAKE_CURRENT_LIST_DIR}/kda_walk_states.cu
    ${CMAKE_CURRENT_LIST_DIR}/kda_walk_gradients.cu
    ${CMAKE_CURRENT_LIST_DIR}/kda_chunk_gradients.cu
    ${CMAKE_CURRENT_LIST_DIR}/dsa_select.cu
    ${CMAKE_CURRENT_LIST_DIR}/dsa_forward.cu
    ${CMAKE_CURRENT_LIST_DIR}/dsa_backward.cu
    ${CMAKE_CURRENT_LIST_DIR}/dsa_backward_hopper.cu
    ${CMAKE_CURRENT_LIST_DIR}/dsa_forward_hopper.cu
    ${CMAKE_CURRENT_LIST_DIR}/dsa_index_hopper.cu
    ${CMAKE_CURRENT_LIST_DIR}/dsa_key_gradients.cu
    ${CMAKE_CURRENT_LIST_DIR}/dsa_pack.cu
    ${CMAKE_CURRENT_LIST_DIR}/dsa_scores_hopper.cu
    ${CMAKE_CURRENT_LIST_DIR}/dsa_token_gradients.cu
    ${CMAKE_CURRENT_LIST_DIR}/router.cu
    ${CMAKE_CURRENT_LIST_DIR}/permute.cu
    ${CMAKE_CURRENT_LIST_DIR}/balance.cu
    ${CMAKE_CURRENT_LIST_DIR}/rows.cu
    ${CMAKE_CURRENT_LIST_DIR}/elementwise.cu
    ${CMAKE_CURRENT_LIST_DIR}/embedding.cu
    ${CMAKE_CURRENT_LIST_DIR}/loss.cpp
    ${CMAKE_CURRENT_LIST_DIR}/loss_rows.cu
    ${CMAKE_CURRENT_LIST_DIR}/loss_tiles.cu
    ${CMAKE_CURRENT_LIST_DIR}/sum_of_squares.cu)

# wgmma and setmaxnreg exist in sm_90a alone; the kernels' bodies are left out of the code for other targets.
set_source_files_properties(${CMAKE_CURRENT_LIST_DIR}/attention_hopper.cu
  ${CMAKE_CURRENT_LIST_DIR}/attention_hopper_backward.cu ${CMAKE_CURRENT_LIST_DIR}/grouped_hopper.cu PROPERTIES
  COMPILE_OPTIONS "-gencode=arch=compute_90a,code=sm_90a")
set_source_files_properties(
  ${CMAKE_CURRENT_LIST_DIR}/dsa_forward_hopper.cu ${CMAKE_CURRENT_LIST_DIR}/dsa_index_hopper.cu
  ${CMAKE_CURRENT_LIST_DIR}/dsa_key_gradients.cu
  ${CMAKE_CURRENT_LIST_DIR}/dsa_scores_hopper.cu ${CMAKE_CURRENT_LIST_DIR}/dsa_token_gradients.cu PROPERTIES
  COMPILE_OPTIONS "-gencode=arch=compute_90a,code=sm_90a")
set_source_files_properties(${CMAKE_CURRENT_LIST_DIR}/loss_tiles.cu PROPERTIES
  COMPILE_OPTIONS "-gencode=arch=compute_90a,code=sm_90a")
