// Which experts a token goes to, and with which weight.
//
// Routing is in fp32 whatever the model computes in. Selection is on the scores plus a bias that no gradient
// reaches: it moves once a step towards equal counts. Where moe.capacity says so, an expert keeps at most
// ceil(capacity * tokens * top_k / experts) slots of a micro-batch, those of highest weight; a dropped one
// adds nothing, has no gradient, and still counts for balancing. Otherwise every token reaches its experts.
#pragma once

#include "examples/moe_trainer/model/decision.hpp"
#include "examples/moe_trainer/model/scope.hpp"

namespace terrace::trainer {

// Where tokens go: expert and weight (tokens, top_k), and the row map that Permute makes of it.
struct Routing {
  BlockRef block;
  std::int32_t* expert = nullptr;
  float* weight = nullptr;
  std::int32_t* offsets = nullptr;  // (experts + 1)
  std::int32_t* row = nullptr;
  std::int32_t* source = nullptr;
};

class ExpertRouter {
 public:
  struct Saved {
    Routing routing;
    Tensor logits;
  };
  explicit ExpertRouter(const LayerScope& scope);
  void allocate(Memory& memory);

  void forward(const Pass& pass, const Tensor& x, Saved& saved);
  // d_x += the gradient through the weights, d_weight (tokens, top_k) of fp32.
  // Whether backward reads the numbers of x.
  [[nodiscard]] bool reads_input() const { return trains(weight_); }
  void backward(const Pass& pass, const Tensor& x, const Saved& saved, const Tensor& d_weight,
                const Tensor& d_x) const;
  void balance(Ops& ops, Stream stream) const;
  [[nodiscard]] const Tensor& bias() const { return bias_; }  // (1, experts)

 private:
  [[nodiscard]] static Parameter& declare_weight(const LayerScope& scope);
  void choose(const Pass& pass, const Tensor& logits, const Routing& routing) const;
  [[nodiscard]] std::int64_t rows() const { return config_.tokens() * config_.moe.top_k; }
  [[nodiscard]] Routing routing_over(BlockRef block) const;
  [[nodiscard]] Bytes routing_bytes() const;
  [[nodiscard]] RouterShape shape() const;
  [[nodiscard]] std::int64_t slots_kept() const;  // of one expert; 0: all

  const Config& config_;
  const ParameterGroup& group_;
  int layer_;
  const Parameter& weight_;
  SiteId site_;
  Tensor bias_;
  Tensor counts_;  // (micro_batches, experts) of int32: slots that chose each expert, dropped ones too
};

}  // namespace terrace::trainer
