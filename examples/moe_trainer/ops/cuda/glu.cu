// y = activation(g, u) and its gradients, row by row. A thread takes 16 bytes of numbers where width, strides
// and addresses allow, one number elsewhere. bf16 results are computed by fast functions, fp32 ones exactly.
#include "examples/moe_trainer/ops/cuda/glu.hpp"

#include "examples/moe_trainer/ops/cuda/elements.cuh"
#include "examples/moe_trainer/ops/cuda/glu_math.cuh"
#include "examples/moe_trainer/ops/cuda/operators.hpp"

namespace terrace::trainer::cuda {
namespace {

template <typename T>
inline constexpr GluMath kMathOf = sizeof(T) == 2 ? GluMath::kFast : GluMath::kExact;

// kCount numbers: one, or 16 bytes of them.
template <typename T, int kCount>
__device__ void load_piece(const T* at, float (&to)[kCount]) {
  if constexpr (kCount == 1) {
    to[0] = load_float(at);
  } else {
    unpack<T>(load_raw(at), to);
  }
}
template <typename T, int kCount>
__device__ void store_piece(T* at, const float (&from)[kCount]) {
  if constexpr (kCount == 1) {
    store_float(at, from[0]);
  } else {
    store_raw(at, pack<T>(from));
  }
}

struct Piece {
  std::int64_t row, column;
};
template <int kCount>
__device__ Piece piece_of(std::int64_t width) {
  const std::int64_t across = width / kCount;
  const std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  return {i / across, i % across * kCount};
}

template <typename T, int kCount, GluActivation kActivation>
__global__ void glu(Glu op, GroupRows of) {
  const Piece at = piece_of<kCount>(op.width);
  if (at.row >= op.rows) return;
  if (of.offsets != nullptr && (at.row < of.offsets[0] || at.row >= of.offsets[of.groups])) return;
  float g[kCount], u[kCount], y[kCount];
  load_piece(op.g.as<T>() + at.row * op.g_stride + at.column, g);
  load_piece(op.u.as<T>() + at.row * op.u_stride + at.column, u);
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const GluFactors f = glu_factors<kActivation, kMathOf<T>>(g[i], u[i]);
    y[i] = f.gate * f.up;
  }
  store_piece(op.y.as<T>() + at.row * op.width + at.column, y);
}

template <typename T, int kCount, GluActivation kActivation>
__global__ void glu_backward(GluBackward op) {
  const Piece at = piece_of<kCount>(op.width);
  if (at.row >= op.rows) return;
  const std::int64_t dense = at.row * op.width + at.column;
  float g[kCount], u[kCount], d_y[kCount], d_g[kCount], d_u[kCount];
  load_piece(op.g.as<T>() + at.row * op.g_stride + at.column, g);
  load_piece(op.u.as<T>() + at.row * op.u_stride + at.column, u);
  load_piece(op.d_y.as<T>() + dense, d_y);
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const GluFactors f = glu_factors<kActivation, kMathOf<T>>(g[i], u[i]);
    d_g[i] = d_y[i] * f.up * f.gate_slope;
    d_u[i] = d_y[i] * f.gate * f.up_slope;
    d_y[i] = f.gate * f.up;  // y from here on
  }
  store_piece(op.d_g.as<T>() + at.row * op.d_g_stride + at.column, d_g);
  store_piece(op.d_u.as<T>() + at.row * op.d_u_stride + at.column, d_u);
  if (op.y) store_piece(op.y.as<T>() + dense, d_y);
}

struct Strided {
  In array;
  std::int64_t stride;
};
// Whether pieces of 16 bytes never straddle a row and always lie at a multiple of 16.
bool in_pieces(std::int64_t width, std::initializer_list<Strided> arrays) {
  for (const Strided& each : arrays) {
    const std::int64_t count = 16 / bytes_of(each.array.dtype());
    if (width % count != 0 || each.stride % count != 0 || !aligned(each.array.at())) return false;
  }
  return true;
}
void require_one_type(const OpCall& call, std::initializer_list<In> arrays) {
  for (const In& each : arrays) {
    call.require(!each || each.dtype() == arrays.begin()->dtype(), "arrays of one type");
  }
}

// body.operator()<T, kCount, kActivation>()
template <typename Body>
void with_kernel(In like, GluActivation activation, bool pieces, Body&& body) {
  with_element(like.dtype(), [&](auto number) {
    using T = decltype(number);
    const auto choose = [&]<int kCount>() {
      if (activation == GluActivation::kSitu) {
        body.template operator()<T, kCount, GluActivation::kSitu>();
      } else {
        body.template operator()<T, kCount, GluActivation::kSwi>();
      }
    };
    if (pieces) {
      choose.template operator()<kPack<T>>();
    } else {
      choose.template operator()<1>();
    }
  });
}

}  // namespace

void launch_glu_of_groups(OpCall& call, const Glu& op, const GroupRows& of) {
  call.set_shape({op.rows, op.width});
  require_one_type(call, {op.g, op.u, op.y});
  const bool pieces = in_pieces(op.width, {{op.g, op.g_stride}, {op.u, op.u_stride}, {op.y, op.width}});
  with_kernel(op.g, op.activation, pieces, [&]<typename T, int kCount, GluActivation kActivation>() {
    call.launch(glu<T, kCount, kActivation>, grid_for(op.rows * (op.width / kCount)), op, of);
  });
}

void launch(OpCall& call, const Glu& op) { launch_glu_of_groups(call, op, {}); }

void launch(OpCall& call, const GluBackward& op) {
  call.set_shape({op.rows, op.width});
  require_one_type(call, {op.g, op.u, op.d_y, op.d_g, op.d_u, op.y});
  const In y = op.y ? In(op.y) : In(op.d_y);
  const bool pieces = in_pieces(op.width, {{op.g, op.g_stride},
                                           {op.u, op.u_stride},
                                           {op.d_y, op.width},
                                           {op.d_g, op.d_g_stride},
                                           {op.d_u, op.d_u_stride},
                                           {y, op.width}});
  with_kernel(op.g, op.activation, pieces, [&]<typename T, int kCount, GluActivation kActivation>() {
    call.launch(glu_backward<T, kCount, kActivation>, grid_for(op.rows * (op.width / kCount)), op);
  });
}

}  // namespace terrace::trainer::cuda
