#include "tests/trainer/golden_file.hpp"

namespace terrace::trainer {

void check_attn_res(OpsBench& bench, const GoldenFile& file) {
  const std::int64_t rows = file.dim("out", 0), width = file.dim("out", 1), sources = file.whole("sources");
  AttnRes op{.rows = rows,
             .width = width,
             .sources = sources,
             .eps = file.number("rms_eps"),
             .v = {},
             .w = bench.upload(file.values("rms_weight")),
             .q = bench.upload(file.values("query")),
             .h = bench.output(rows * width)};
  AttnResBackward back{.rows = rows,
                       .width = width,
                       .sources = sources,
                       .eps = op.eps,
                       .v = {},
                       .w = op.w,
                       .q = op.q,
                       .d_h = bench.upload(file.values("d_out")),
                       .d_v = {},
                       .d_w = bench.zeros(width),
                       .d_q = bench.zeros(width)};
  for (std::int64_t l = 0; l < sources; ++l) {
    op.v[l] = back.v[l] = bench.upload(file.values("source_" + std::to_string(l)));
    back.d_v[l] = bench.output(rows * width);
  }
  bench.ops().run(bench.stream(), op);
  bench.ops().run(bench.stream(), back);
  expect_golden(bench, file, "out", op.h.f32(), kGoldenOutput);
  for (std::int64_t l = 0; l < sources; ++l) {
    expect_golden(bench, file, "d_source_" + std::to_string(l), back.d_v[l].f32(), kGoldenGradient);
  }
  expect_golden(bench, file, "d_rms_weight", back.d_w, kGoldenGradient);
  expect_golden(bench, file, "d_query", back.d_q, kGoldenGradient);
}

}  // namespace terrace::trainer
