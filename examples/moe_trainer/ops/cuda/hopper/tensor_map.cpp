#include "examples/moe_trainer/ops/cuda/hopper/tensor_map.hpp"

namespace terrace::trainer::cuda::hopper {
namespace {

constexpr std::int64_t kAlignment = 16;
constexpr std::int64_t kSwizzleBytes = 128;
constexpr std::int64_t kMaxBox = 256;
constexpr std::int64_t kMaxExtent = 1LL << 32;
constexpr std::int64_t kMaxStrideBytes = 1LL << 40;
constexpr unsigned kEncodeSince = 12000;  // the driver API version that brought cuTensorMapEncodeTiled

std::int64_t element_bytes(ElementType type) {
  return type == ElementType::kF32 ? 4 : type == ElementType::kBf16 ? 2 : 1;
}
CUtensorMapDataType data_type(ElementType type) {
  return type == ElementType::kF32    ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32
         : type == ElementType::kBf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                      : CU_TENSOR_MAP_DATA_TYPE_UINT8;
}

using Encode = decltype(&cuTensorMapEncodeTiled);

// The driver is not linked: the runtime finds the function in it.
Encode encode_function(OpCall& call) {
  static const Encode function = [&] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result{};
    call.check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, kEncodeSince,
                                                cudaEnableDefault, &result),
               "cudaGetDriverEntryPointByVersion");
    call.require(result == cudaDriverEntryPointSuccess && found != nullptr, "a driver with tensor maps");
    return reinterpret_cast<Encode>(found);
  }();
  return function;
}

}  // namespace

bool takes_tensor_map(const TensorView& view) {
  const std::int64_t bytes = element_bytes(view.type);
  if (view.rank < 2 || view.rank > kMaxTensorRank) return false;
  if (view.at == nullptr || reinterpret_cast<std::uintptr_t>(view.at) % kAlignment != 0) return false;
  if (view.box[0] * bytes % kAlignment != 0) return false;
  if (view.swizzle == Swizzle::k128 && view.box[0] * bytes > kSwizzleBytes) return false;
  for (int i = 0; i < view.rank; ++i) {
    if (view.extent[i] < 1 || view.extent[i] > kMaxExtent) return false;
    if (view.box[i] < 1 || view.box[i] > kMaxBox) return false;
    if (i == 0) continue;
    const std::int64_t stride = view.stride[i] * bytes;
    if (stride <= 0 || stride % kAlignment != 0 || stride >= kMaxStrideBytes) return false;
  }
  return true;
}

CUtensorMap make_tensor_map(OpCall& call, const TensorView& view) {
  CUtensorMap map{};
  cuuint64_t extent[kMaxTensorRank] = {};
  cuuint64_t stride[kMaxTensorRank] = {};  // bytes, from dimension 1 on
  cuuint32_t box[kMaxTensorRank] = {};
  cuuint32_t step[kMaxTensorRank] = {};
  for (int i = 0; i < view.rank; ++i) {
    extent[i] = static_cast<cuuint64_t>(view.extent[i]);
    if (i > 0) stride[i - 1] = static_cast<cuuint64_t>(view.stride[i] * element_bytes(view.type));
    box[i] = static_cast<cuuint32_t>(view.box[i]);
    step[i] = 1;
  }
  const CUresult result = encode_function(call)(
      &map, data_type(view.type), static_cast<cuuint32_t>(view.rank), const_cast<void*>(view.at), extent,
      stride, box, step, CU_TENSOR_MAP_INTERLEAVE_NONE,
      view.swizzle == Swizzle::k128 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_NONE,
      CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  call.require(result == CUDA_SUCCESS, "an array that the bulk copy engine takes");
  return map;
}

DeviceTraits device_traits(OpCall& call) {
  int device = 0, major = 0, minor = 0, processors = 0;
  call.check(cudaGetDevice(&device), "cudaGetDevice");
  const auto get = [&](int* value, cudaDeviceAttr which) {
    call.check(cudaDeviceGetAttribute(value, which, device), "cudaDeviceGetAttribute");
  };
  get(&major, cudaDevAttrComputeCapabilityMajor);
  get(&minor, cudaDevAttrComputeCapabilityMinor);
  get(&processors, cudaDevAttrMultiProcessorCount);
  return {.hopper = major == 9 && minor == 0, .processors = processors};
}

}  // namespace terrace::trainer::cuda::hopper
