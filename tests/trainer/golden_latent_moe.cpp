// The latent mixture of experts: y = W_u rmsnorm(sum_j p_j E_j(W_d x)) + shared(x), from single operators.
#include "tests/trainer/golden_file.hpp"

namespace terrace::trainer {
namespace {

constexpr auto kNo = Transpose::kNo;
constexpr auto kYes = Transpose::kYes;

class LatentMoe {
 public:
  LatentMoe(OpsBench& bench, const GoldenFile& file)
      : bench_(bench),
        file_(file),
        tokens_(file.dim("x", 0)),
        width_(file.dim("x", 1)),
        latent_(file.dim("w_down_latent", 0)),
        inner_(file.dim("w_gate", 1)),
        shared_(file.dim("ws_gate", 0)),
        router_{.tokens = tokens_,
                .experts = file.whole("experts"),
                .top_k = file.whole("topk"),
                .groups = file.whole("groups"),
                .top_groups = file.whole("topk_groups"),
                .scaling = file.number("routed_scaling")},
        rows_(tokens_ * router_.top_k),
        eps_(file.number("rms_eps")),
        x_(bench.upload(file.values("x"))) {}

  void forward() {
    logits_ = linear(x_, "w_router", {tokens_, router_.experts, width_});
    expert_ = bench_.int_output(rows_);
    weight_ = bench_.output(rows_);
    ops().run(stream(), Router{router_, logits_, weights("bias"), expert_, weight_});
    offsets_ = bench_.int_output(router_.experts + 1);
    row_ = bench_.int_output(rows_);
    source_ = bench_.int_output(rows_);
    ops().run(stream(), Permute{tokens_, router_.experts, router_.top_k, expert_, offsets_, row_, source_});
    float* z = linear(x_, "w_down_latent", {tokens_, latent_, width_});
    z_rows_ = bench_.output(rows_ * latent_);
    ops().run(stream(), GatherRows{rows_, latent_, router_.top_k, source_, z, z_rows_});
    g_ = grouped(z_rows_, "w_gate", {inner_, latent_});
    u_ = grouped(z_rows_, "w_up", {inner_, latent_});
    h_ = bench_.output(rows_ * inner_);
    ops().run(stream(), Glu{rows_, inner_, GluActivation::kSitu, g_, inner_, u_, inner_, h_});
    e_ = grouped(h_, "w_out", {latent_, inner_});
    mixed_ = bench_.output(tokens_ * latent_);
    ops().run(stream(), SumRows{tokens_, latent_, router_.top_k, row_, weight_, e_, mixed_});
    normal_ = bench_.output(tokens_ * latent_);
    ops().run(stream(), RmsNorm{tokens_, latent_, eps_, mixed_, weights("norm_weight"), normal_});
    float* out = linear(normal_, "w_up_latent", {tokens_, width_, latent_});
    sg_ = linear(x_, "ws_gate", {tokens_, shared_, width_});
    su_ = linear(x_, "ws_up", {tokens_, shared_, width_});
    sh_ = bench_.output(tokens_ * shared_);
    ops().run(stream(), Glu{tokens_, shared_, GluActivation::kSitu, sg_, shared_, su_, shared_, sh_});
    float* from_shared = linear(sh_, "ws_out", {tokens_, width_, shared_});
    ops().run(stream(), Add{tokens_ * width_, out, from_shared, out});
    expect_golden(bench_, file_, "out", out, kGoldenOutput);
    EXPECT_EQ(bench_.ints(expert_, rows_), file_.ints("expert_index"));
    expect_golden(bench_, file_, "expert_weight", weight_, kGoldenOutput);
  }

  void backward() {
    float* d_out = bench_.upload(file_.values("d_out"));
    d_x_ = bench_.zeros(tokens_ * width_);
    float* d_sh = linear_backward(d_out, sh_, "ws_out", {tokens_, width_, shared_});
    float* d_sg = bench_.output(tokens_ * shared_);
    float* d_su = bench_.output(tokens_ * shared_);
    ops().run(stream(), GluBackward{tokens_, shared_, GluActivation::kSitu, sg_, shared_, su_, shared_, d_sh,
                                    d_sg, shared_, d_su, shared_});
    add_to_d_x(linear_backward(d_sg, x_, "ws_gate", {tokens_, shared_, width_}));
    add_to_d_x(linear_backward(d_su, x_, "ws_up", {tokens_, shared_, width_}));
    experts_backward(linear_backward(d_out, normal_, "w_up_latent", {tokens_, width_, latent_}));
    expect_golden(bench_, file_, "d_x", d_x_, kGoldenGradient);
  }

 private:
  struct Linear {
    std::int64_t rows, out, in;
  };
  struct Expert {
    std::int64_t out, in;
  };

  Ops& ops() { return bench_.ops(); }
  Stream stream() { return bench_.stream(); }
  float* weights(const char* name) { return bench_.upload(file_.values(name)); }

  float* linear(const float* x, const char* name, const Linear& l) {
    float* y = bench_.output(l.rows * l.out);
    ops().run(stream(), Matmul{l.rows, l.out, l.in, x, kNo, weights(name), kYes, y});
    return y;
  }
  float* linear_backward(const float* d_y, const float* x, const char* name, const Linear& l) {
    float* d_w = bench_.output(l.out * l.in);
    float* d_x = bench_.output(l.rows * l.in);
    ops().run(stream(), Matmul{l.out, l.in, l.rows, d_y, kYes, x, kNo, d_w});
    ops().run(stream(), Matmul{l.rows, l.in, l.out, d_y, kNo, weights(name), kNo, d_x});
    expect_golden(bench_, file_, std::string("d_") + name, d_w, kGoldenGradient);
    return d_x;
  }
  float* grouped(const float* x, const char* name, const Expert& e) {
    float* y = bench_.output(rows_ * e.out);
    ops().grouped_forward(stream(), {router_.experts, rows_, e.out, e.in, offsets_, x, weights(name), y});
    return y;
  }
  float* grouped_backward(const float* d_y, const float* x, const char* name, const Expert& e) {
    float* d_w = bench_.output(router_.experts * e.out * e.in);
    float* d_x = bench_.output(rows_ * e.in);
    ops().run(stream(), GroupedWeightGradient{router_.experts, rows_, e.out, e.in, offsets_, d_y, x, d_w});
    ops().grouped_input_gradient(stream(),
                                 {router_.experts, rows_, e.out, e.in, offsets_, d_y, weights(name), d_x});
    expect_golden(bench_, file_, std::string("d_") + name, d_w, kGoldenGradient);
    return d_x;
  }
  void add_to_d_x(const float* part) { ops().run(stream(), Add{tokens_ * width_, d_x_, part, d_x_}); }

  void experts_backward(const float* d_normal) {
    float* d_mixed = bench_.output(tokens_ * latent_);
    float* d_norm = bench_.zeros(latent_);
    ops().run(stream(), RmsNormBackward{.rows = tokens_,
                                        .width = latent_,
                                        .eps = eps_,
                                        .x = mixed_,
                                        .w = weights("norm_weight"),
                                        .d_y = d_normal,
                                        .d_x = d_mixed,
                                        .d_w = d_norm});
    expect_golden(bench_, file_, "d_norm_weight", d_norm, kGoldenGradient);
    float* d_e = bench_.output(rows_ * latent_);
    float* d_weight = bench_.output(rows_);
    ops().run(stream(),
              SumRowsBackward{tokens_, latent_, router_.top_k, row_, weight_, e_, d_mixed, d_e, d_weight});
    float* d_h = grouped_backward(d_e, h_, "w_out", {latent_, inner_});
    float* d_g = bench_.output(rows_ * inner_);
    float* d_u = bench_.output(rows_ * inner_);
    ops().run(stream(), GluBackward{rows_, inner_, GluActivation::kSitu, g_, inner_, u_, inner_, d_h, d_g,
                                    inner_, d_u, inner_});
    float* d_rows = grouped_backward(d_g, z_rows_, "w_gate", {inner_, latent_});
    float* from_up = grouped_backward(d_u, z_rows_, "w_up", {inner_, latent_});
    ops().run(stream(), Add{rows_ * latent_, d_rows, from_up, d_rows});
    float* d_z = bench_.output(tokens_ * latent_);
    ops().run(stream(), SumRows{tokens_, latent_, router_.top_k, row_, nullptr, d_rows, d_z});
    add_to_d_x(linear_backward(d_z, x_, "w_down_latent", {tokens_, latent_, width_}));
    float* d_logits = bench_.output(tokens_ * router_.experts);
    ops().run(stream(), RouterBackward{router_, logits_, expert_, d_weight, d_logits});
    add_to_d_x(linear_backward(d_logits, x_, "w_router", {tokens_, router_.experts, width_}));
  }

  OpsBench& bench_;
  const GoldenFile& file_;
  std::int64_t tokens_, width_, latent_, inner_, shared_;
  RouterShape router_;
  std::int64_t rows_;
  float eps_;
  float* x_;
  float *logits_ = nullptr, *weight_ = nullptr, *z_rows_ = nullptr, *g_ = nullptr, *u_ = nullptr,
        *h_ = nullptr, *e_ = nullptr, *mixed_ = nullptr, *normal_ = nullptr, *sg_ = nullptr, *su_ = nullptr,
        *sh_ = nullptr, *d_x_ = nullptr;
  std::int32_t *expert_ = nullptr, *offsets_ = nullptr, *row_ = nullptr, *source_ = nullptr;
};

}  // namespace

void check_latent_moe(OpsBench& bench, const GoldenFile& file) {
  LatentMoe moe(bench, file);
  moe.forward();
  moe.backward();
}

}  // namespace terrace::trainer
