#include "examples/moe_trainer/ops/cpu/gemm.hpp"

#include <cblas.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <vector>

#include "examples/moe_trainer/ops/cpu/blas_kernels.hpp"
#include "examples/moe_trainer/ops/cpu/kernels.hpp"
#include "examples/moe_trainer/ops/cpu/parallel.hpp"

namespace terrace::trainer::cpu {
namespace {

// The library's own threads stay asleep: our pool decides who computes what.
void prepare_blas() {
  static const int once = (choose_blas_kernels(), openblas_set_num_threads(1), 0);
  (void)once;
}

CBLAS_TRANSPOSE blas(Transpose t) { return t == Transpose::kYes ? CblasTrans : CblasNoTrans; }

// Rows [begin, end) of C.
Gemm row_part(const Gemm& g, std::int64_t begin, std::int64_t end) {
  Gemm part = g;
  part.m = end - begin;
  part.a += g.ta == Transpose::kNo ? begin * g.lda : begin;
  part.c += begin * g.ldc;
  return part;
}
Gemm column_part(const Gemm& g, std::int64_t begin, std::int64_t end) {
  Gemm part = g;
  part.n = end - begin;
  part.b += g.tb == Transpose::kNo ? begin : begin * g.ldb;
  part.c += begin;
  return part;
}

std::int64_t share(std::int64_t count, std::int64_t parts, std::int64_t tile) {
  return ((count + parts - 1) / parts + tile - 1) / tile * tile;
}

// One expert's rows of a grouped product are cut where they exceed a fair share of all rows.
struct Piece {
  std::int64_t group, begin, end;
};
std::vector<Piece> balanced_pieces(const std::int32_t* offsets, std::int64_t groups) {
  const std::int64_t longest = share(offsets[groups] - offsets[0], worker_count() * 2, 16);
  std::vector<Piece> pieces;
  for (std::int64_t e = 0; e < groups; ++e) {
    for (std::int64_t row = offsets[e]; row < offsets[e + 1]; row += longest) {
      pieces.push_back({e, row, std::min<std::int64_t>(offsets[e + 1], row + longest)});
    }
  }
  return pieces;
}

}  // namespace

void gemm_here(const Gemm& g) {
  if (g.m <= 0 || g.n <= 0) return;
  const float beta = g.into == Accumulate::kAdd ? 1.0F : 0.0F;
  if (g.k <= 0) {
    if (beta == 0.0F) {
      for (std::int64_t i = 0; i < g.m; ++i) std::fill_n(g.c + i * g.ldc, g.n, 0.0F);
    }
    return;
  }
  prepare_blas();
  const auto dim = [](std::int64_t x) { return static_cast<blasint>(x); };
  cblas_sgemm(CblasRowMajor, blas(g.ta), blas(g.tb), dim(g.m), dim(g.n), dim(g.k), 1.0F, g.a, dim(g.lda), g.b,
              dim(g.ldb), beta, g.c, dim(g.ldc));
}

void gemm_parallel(const Gemm& g) {
  const std::int64_t parts = worker_count();
  if (g.m >= g.n) {
    parallel_ranges(g.m, std::max<std::int64_t>(1, share(g.m, parts, 16)),
                    [&](std::int64_t begin, std::int64_t end) { gemm_here(row_part(g, begin, end)); });
  } else {
    parallel_ranges(g.n, std::max<std::int64_t>(1, share(g.n, parts, 16)),
                    [&](std::int64_t begin, std::int64_t end) { gemm_here(column_part(g, begin, end)); });
  }
}

void compute(const Matmul& op, std::byte*) {
  gemm_parallel({.m = op.m,
                 .n = op.n,
                 .k = op.k,
                 .a = op.a,
                 .lda = op.ta == Transpose::kNo ? op.k : op.m,
                 .ta = op.ta,
                 .b = op.b,
                 .ldb = op.tb == Transpose::kNo ? op.n : op.k,
                 .tb = op.tb,
                 .c = op.c,
                 .ldc = op.n,
                 .into = op.into});
}

void compute(const GroupedMatmul& op, GroupedPass pass) {
  const bool forward = pass == GroupedPass::kForward;
  const std::int64_t in = forward ? op.k : op.n, out = forward ? op.n : op.k;
  const std::vector<Piece> pieces = balanced_pieces(op.offsets, op.groups);
  parallel_for(static_cast<std::int64_t>(pieces.size()), [&](std::int64_t index, std::int64_t) {
    const Piece& piece = pieces[static_cast<std::size_t>(index)];
    gemm_here({.m = piece.end - piece.begin,
               .n = out,
               .k = in,
               .a = op.a + piece.begin * in,
               .lda = in,
               .ta = Transpose::kNo,
               .b = op.w + piece.group * op.n * op.k,
               .ldb = op.k,
               .tb = forward ? Transpose::kYes : Transpose::kNo,
               .c = op.c + piece.begin * out,
               .ldc = out,
               .into = op.into});
  });
}

void compute(const GroupedWeightGradient& op, std::byte*) {
  // Each expert's gradient in row halves: an expert with most of the rows still keeps two threads busy.
  const std::int64_t halves = op.n >= 32 ? 2 : 1;
  const std::int64_t half = share(op.n, halves, 16);
  parallel_for(op.groups * halves, [&](std::int64_t index, std::int64_t) {
    const std::int64_t e = index / halves, begin = index % halves * half, end = std::min(op.n, begin + half);
    const std::int64_t first = op.offsets[e], rows = op.offsets[e + 1] - first;
    gemm_here({.m = end - begin,
               .n = op.k,
               .k = rows,
               .a = op.d_c + first * op.n + begin,
               .lda = op.n,
               .ta = Transpose::kYes,
               .b = op.a + first * op.k,
               .ldb = op.k,
               .tb = Transpose::kNo,
               .c = op.d_w + e * op.n * op.k + begin * op.k,
               .ldc = op.k,
               .into = op.into});
  });
}

double measure_gemm_flops_per_second(std::int64_t rows, std::int64_t width) {
  const auto size = [](std::int64_t n) { return static_cast<std::size_t>(n); };
  const std::vector<float> a(size(rows * width), 0.5F), b(size(width * width), 0.25F);
  std::vector<float> c(size(rows * width));
  const Gemm gemm{.m = rows,
                  .n = width,
                  .k = width,
                  .a = a.data(),
                  .lda = width,
                  .ta = Transpose::kNo,
                  .b = b.data(),
                  .ldb = width,
                  .tb = Transpose::kYes,
                  .c = c.data(),
                  .ldc = width};
  double best = 0;
  for (int run = 0; run < 6; ++run) {
    const auto from = std::chrono::steady_clock::now();
    gemm_parallel(gemm);
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - from;
    const double flops =
        2.0 * static_cast<double>(rows) * static_cast<double>(width) * static_cast<double>(width);
    best = std::max(best, flops / std::max(took.count(), 1e-9));
  }
  return best;
}

}  // namespace terrace::trainer::cpu
