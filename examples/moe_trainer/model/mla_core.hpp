// The attention inside MLA, between its projections: keys expanded for every head and all tokens looked at,
// or queries brought to the latent width and an indexer's choice looked at.
#pragma once

#include <memory>

#include "examples/moe_trainer/model/scope.hpp"

namespace terrace::trainer {

// A head's query and key have two parts, nope_width without position and rope_width with it; the second is
// one for all heads in the keys.
struct MlaInputs {
  Tensor q;       // (tokens, heads * (nope + rope))
  Tensor latent;  // (tokens, kv_rank): keys' first part and values come from it
  Tensor k_rope;  // (tokens, rope)
};
struct MlaSources {  // of the layer and of the query's projection: what an indexer reads
  const Tensor& x;
  const Tensor& query;
};

class MlaCore {
 public:
  struct Saved {
    virtual ~Saved() = default;
  };
  virtual ~MlaCore() = default;
  // (tokens, heads * value_width). Keeps of `in` what it reads in backward.
  [[nodiscard]] virtual Tensor forward(const Pass& pass, const MlaSources& from, MlaInputs in,
                                       std::unique_ptr<Saved>& saved) = 0;
  // Whether backward reads the numbers of what `from` names: of the layer, of the query's projection.
  [[nodiscard]] virtual bool reads_input() const { return false; }
  [[nodiscard]] virtual bool reads_query() const { return false; }
  // The gradients of the inputs.
  [[nodiscard]] virtual MlaInputs backward(const Pass& pass, const MlaSources& from,
                                           std::unique_ptr<Saved> saved, const Tensor& d_attended) = 0;
};

[[nodiscard]] std::unique_ptr<MlaCore> make_expanded_mla(const LayerScope& scope);
[[nodiscard]] std::unique_ptr<MlaCore> make_absorbed_mla(const LayerScope& scope);

// Two tensors one behind the other in one block, as a RowMap reads them.
struct Joined {
  Tensor all;  // (1, numbers)
  Tensor first, second;
};
struct JoinedShape {
  std::int64_t rows, first_width, second_width;
};
[[nodiscard]] Joined joined(const Pass& pass, const JoinedShape& shape);
void copy(const Pass& pass, const Tensor& from, const Tensor& to);

}  // namespace terrace::trainer
