// Where the model meets Swap Core: one function through which every site's output passes.
#pragma once

#include <optional>
#include <string>
#include <utility>

#include "examples/moe_trainer/model/pass.hpp"

namespace terrace::trainer {

// Declares `layer.<layer>.<group>`; the same operator of all layers shares the group, and so a measured cost.
struct SiteName {
  int layer;
  std::string group;  // "kda.q"
  SiteKind kind;
};
[[nodiscard]] SiteId declare_site(Session& session, const SiteName& name);

enum class Reads : std::uint8_t { kInBackward, kInForwardOnly };

struct SiteShape {
  std::int64_t rows, width;
  Dtype dtype;
};

[[nodiscard]] constexpr Element element_of(Dtype dtype) {
  return dtype == Dtype::kF32 ? Element::kF32 : Element::kBf16;
}

// The output of a site.
//   forward    computed; offered to the session if layers are recomputed and backward reads it
//   recompute  what the session kept, or else computed
// `compute(out)` launches on the pass's stream and writes all of `out`.
template <typename Compute>
[[nodiscard]] Tensor site_output(const Pass& pass, SiteId site, Reads reads, const SiteShape& shape,
                                 Compute&& compute) {
  const SiteKey key{site, pass.micro_batch};
  if (pass.phase == Phase::kRecompute) {
    const Tensor wanted{
        .block = nullptr, .at = nullptr, .rows = shape.rows, .width = shape.width, .dtype = shape.dtype};
    if (BlockRef kept = pass.session.fetch(key, wanted.bytes())) {
      return Tensor::over(std::move(kept), shape.rows, shape.width, shape.dtype);
    }
  }
  Tensor out = pass.memory.tensor(shape.rows, shape.width, Pool::kActivation, shape.dtype);
  if (pass.recompute == Recompute::kNone) {
    const Session::Span span(pass.session, site);
    compute(out);
    return out;
  }
  {
    const Session::Timing timing(pass.session, site);
    compute(out);
  }
  if (pass.phase == Phase::kForward && reads == Reads::kInBackward)
    pass.session.offer(key, out.block, element_of(shape.dtype));
  return out;
}

// Of activations.
template <typename Compute>
[[nodiscard]] Tensor site_output(const Pass& pass, SiteId site, Reads reads, std::int64_t rows,
                                 std::int64_t width, Compute&& compute) {
  return site_output(pass, site, reads, SiteShape{rows, width, pass.compute}, std::forward<Compute>(compute));
}

}  // namespace terrace::trainer
