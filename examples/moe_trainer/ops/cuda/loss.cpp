// loss_sum += sum over counted t of (lse_t - z_t[label_t]),  z = hidden weight^T
//   hidden: (T, D)   weight: (V, D)   labels: (T), -100: not counted
// d_z = (softmax(z) - onehot(label)) scale;  d_hidden = d_z weight;  d_weight += d_z^T hidden
// in chunks of tokens, and of words where loss_plan.hpp says so. z of our own product (bf16 on Hopper) never
// exists: it leaves e^(z - largest) or d_z; elsewhere cuBLAS makes it in fp32.
#include "examples/moe_trainer/ops/cuda/loss.hpp"

#include <algorithm>

#include "examples/moe_trainer/ops/cuda/hopper/tensor_map.hpp"
#include "examples/moe_trainer/ops/cuda/loss_plan.hpp"
#include "examples/moe_trainer/ops/cuda/loss_rows.hpp"
#include "examples/moe_trainer/ops/cuda/loss_tiles.hpp"
#include "examples/moe_trainer/ops/cuda/operators.hpp"

namespace terrace::trainer::cuda {
namespace {

struct Matrix {
  In at;
  std::int64_t pitch;  // from one stored row to the next
  Transpose stored = Transpose::kNo;
};
struct Product {  // c (m, n) = a (m, k) b (k, n) [+ c]
  std::int64_t m, n, k;
  Matrix a, b;
  Out c;  // dense
  std::int64_t c_pitch;
  Accumulate into = Accumulate::kOverwrite;
};

// How cuBLAS computes for the life of this: bf16 on tensor cores with fp32 sums throughout, fp32 as it is
// set.
class MathMode {
 public:
  MathMode(OpCall& call, Dtype dtype) : handle_(call.blas()) {
    call.check(cublasGetMathMode(handle_, &before_), "cublasGetMathMode");
    if (dtype == Dtype::kBf16) call.check(cublasSetMathMode(handle_, kBf16Mode), "cublasSetMathMode");
  }
  ~MathMode() { (void)cublasSetMathMode(handle_, before_); }
  MathMode(const MathMode&) = delete;
  MathMode& operator=(const MathMode&) = delete;

 private:
  static constexpr auto kBf16Mode =
      static_cast<cublasMath_t>(CUBLAS_DEFAULT_MATH | CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION);

  cublasHandle_t handle_;
  cublasMath_t before_ = CUBLAS_DEFAULT_MATH;
};

cudaDataType_t cuda_type(Dtype dtype) { return dtype == Dtype::kF32 ? CUDA_R_32F : CUDA_R_16BF; }

// cuBLAS is column-major: a row-major matrix is its own transpose there, so c^T = b^T a^T is asked for.
void multiply(OpCall& call, const Product& p) {
  const float one = 1.0F;
  const float beta = p.into == Accumulate::kAdd ? 1.0F : 0.0F;
  const auto operation = [](const Matrix& matrix) {
    return matrix.stored == Transpose::kYes ? CUBLAS_OP_T : CUBLAS_OP_N;
  };
  const cublasComputeType_t compute =
      p.a.at.dtype() == Dtype::kF32 ? CUBLAS_COMPUTE_32F_PEDANTIC : CUBLAS_COMPUTE_32F;
  call.check(
      cublasGemmEx_64(call.blas(), operation(p.b), operation(p.a), p.n, p.m, p.k, &one, p.b.at.at(),
                      cuda_type(p.b.at.dtype()), p.b.pitch, p.a.at.at(), cuda_type(p.a.at.dtype()), p.a.pitch,
                      &beta, p.c.at(), cuda_type(p.c.dtype()), p.c_pitch, compute, CUBLAS_GEMM_DEFAULT),
      "cublasGemmEx");
}

// `index` numbers into an array of either type.
In further(In array, std::int64_t index) {
  return {static_cast<const std::byte*>(array.at()) + index * bytes_of(array.dtype()), array.dtype()};
}
Out further(Out array, std::int64_t index) {
  return {static_cast<std::byte*>(array.at()) + index * bytes_of(array.dtype()), array.dtype()};
}

class LossRun {
 public:
  LossRun(OpCall& call, const LinearCrossEntropy& op, const LossShape& shape, std::int64_t limit_bytes)
      : call_(call),
        op_(op),
        shape_(shape),
        plan_(plan_loss(shape, limit_bytes)),
        scratch_(call.scratch<std::byte>(plan_.bytes)) {
    if (tiles()) maps_ = make_tile_maps(call, matrices_of(op));
  }

  static TileMatrices matrices_of(const LinearCrossEntropy& op) {
    return {op.tokens, op.width, op.vocabulary, op.hidden.as<Bf16>(), op.weight.as<Bf16>()};
  }

  void run() {
    for (std::int64_t row = 0; row < op_.tokens; row += plan_.rows) {
      const Chunk chunk{row, rows_at(row)};
      read_logits(chunk);
      finish_rows(call_, chunk.of, op_.loss_sum);
      if (shape_.pass == LossPass::kForward) continue;
      for (std::int64_t word = 0; word < op_.vocabulary; word += plan_.slice) backward(chunk, slice_at(word));
      if (op_.d_hidden && in_sums()) {
        narrow(call_, at<float>(plan_.sums), chunk.of.rows * op_.width,
               further(op_.d_hidden, row * op_.width).as<Bf16>());
      }
    }
  }

 private:
  struct Chunk {
    std::int64_t row;
    RowsOf of;
  };

  [[nodiscard]] bool tiles() const { return shape_.path == LossPath::kTiles; }
  [[nodiscard]] bool kept() const { return plan_.slice == op_.vocabulary; }
  // bf16 d_hidden of several slices is summed in fp32.
  [[nodiscard]] bool in_sums() const { return !kept() && shape_.dtype == Dtype::kBf16; }
  template <typename T>
  [[nodiscard]] T* at(std::int64_t offset) const {
    return reinterpret_cast<T*>(scratch_ + offset);
  }
  [[nodiscard]] RowsOf rows_at(std::int64_t row) const {
    return {.rows = std::min(plan_.rows, op_.tokens - row),
            .parts = plan_.parts,
            .vocabulary = op_.vocabulary,
            .labels = op_.labels + row,
            .part = at<LogitPart>(plan_.parts_at),
            .label_logits = at<float>(plan_.label_logits),
            .states = at<RowState>(plan_.states),
            .losses = at<float>(plan_.losses),
            .gradient_scale = op_.gradient_scale};
  }
  [[nodiscard]] LogitsSlice slice_at(std::int64_t word) const {
    return {.first_word = word,
            .words = std::min(plan_.slice, op_.vocabulary - word),
            .pitch = plan_.pitch,
            .part = word / plan_.slice};
  }
  [[nodiscard]] TileRange range_of(const Chunk& chunk, const LogitsSlice& slice) const {
    return {.first_row = chunk.row,
            .first_word = slice.first_word,
            .words = slice.words,
            .width = op_.width,
            .pitch = plan_.pitch,
            .out = at<Bf16>(plan_.logits)};
  }

  // Every row's parts and label logit; the exponentials or the logits too where they are kept.
  void read_logits(const Chunk& chunk) {
    if (tiles()) {
      const bool keep = kept() && shape_.pass == LossPass::kForwardBackward;
      const LogitsSlice all{.first_word = 0, .words = op_.vocabulary, .pitch = plan_.pitch, .part = 0};
      launch_tiles(call_, keep ? TileResult::kPartsAndExponentials : TileResult::kParts, maps_, chunk.of,
                   range_of(chunk, all));
      return;
    }
    for (std::int64_t word = 0; word < op_.vocabulary; word += plan_.slice) {
      make_logits(chunk, slice_at(word));
      fold_logits(call_, chunk.of, slice_at(word), at<float>(plan_.logits));
    }
  }
  void make_logits(const Chunk& chunk, const LogitsSlice& slice) {
    multiply(call_, {.m = chunk.of.rows,
                     .n = slice.words,
                     .k = op_.width,
                     .a = {further(op_.hidden, chunk.row * op_.width), op_.width},
                     .b = {further(op_.weight, slice.first_word * op_.width), op_.width, Transpose::kYes},
                     .c = at<float>(plan_.logits),
                     .c_pitch = plan_.pitch});
  }

  // d_z of the slice, in scratch.
  [[nodiscard]] Out make_gradient(const Chunk& chunk, const LogitsSlice& slice) {
    const Out d_logits(at<std::byte>(plan_.gradient), shape_.dtype);
    if (!tiles()) {
      if (!kept()) make_logits(chunk, slice);
      logits_gradient(call_, chunk.of, slice, at<float>(plan_.logits), d_logits);
    } else if (kept()) {
      exponentials_gradient(call_, chunk.of, plan_.pitch, d_logits.as<Bf16>());
    } else {
      launch_tiles(call_, TileResult::kGradient, maps_, chunk.of, range_of(chunk, slice));
    }
    return d_logits;
  }

  void backward(const Chunk& chunk, const LogitsSlice& slice) {
    const Out d_logits = make_gradient(chunk, slice);
    const std::int64_t rows = chunk.of.rows, width = op_.width, weight_at = slice.first_word * width;
    if (op_.d_hidden) {
      multiply(call_, {.m = rows,
                       .n = width,
                       .k = slice.words,
                       .a = {d_logits, slice.pitch},
                       .b = {further(op_.weight, weight_at), width},
                       .c = in_sums() ? Out(at<float>(plan_.sums)) : further(op_.d_hidden, chunk.row * width),
                       .c_pitch = width,
                       .into = slice.first_word == 0 ? Accumulate::kOverwrite : Accumulate::kAdd});
    }
    if (op_.d_weight != nullptr) {
      multiply(call_, {.m = slice.words,
                       .n = width,
                       .k = rows,
                       .a = {d_logits, slice.pitch, Transpose::kYes},
                       .b = {further(op_.hidden, chunk.row * width), width},
                       .c = op_.d_weight + weight_at,
                       .c_pitch = width,
                       .into = Accumulate::kAdd});
    }
  }

  OpCall& call_;
  const LinearCrossEntropy& op_;
  LossShape shape_;
  LossPlan plan_;
  std::byte* scratch_;
  TileMaps maps_{};
};

}  // namespace

void launch_loss(OpCall& call, const LinearCrossEntropy& op, std::int64_t limit_bytes) {
  call.set_shape({op.tokens, op.width, op.vocabulary});
  if (op.tokens <= 0) return;
  const Dtype dtype = op.hidden.dtype();
  call.require(op.width >= 1 && op.vocabulary >= 1, "a width and a vocabulary of at least 1");
  call.require(op.weight.dtype() == dtype && (!op.d_hidden || op.d_hidden.dtype() == dtype),
               "hidden, weight and d_hidden of one type");
  const bool backward = op.d_hidden || op.d_weight != nullptr;
  const bool tiles =
      dtype == Dtype::kBf16 && hopper::device_traits(call).hopper && take_tiles(LossRun::matrices_of(op));
  const LossShape shape{.tokens = op.tokens,
                        .width = op.width,
                        .vocabulary = op.vocabulary,
                        .dtype = dtype,
                        .path = tiles ? LossPath::kTiles : LossPath::kLibrary,
                        .pass = backward ? LossPass::kForwardBackward : LossPass::kForward};
  const MathMode mode(call, dtype);
  LossRun(call, op, shape, limit_bytes).run();
}

void launch(OpCall& call, const LinearCrossEntropy& op) { launch_loss(call, op, kLossScratchBytes); }

}  // namespace terrace::trainer::cuda
