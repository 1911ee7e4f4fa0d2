// Where the model meets Swap Core: one function through which every site's output passes.
#pragma once

#include <optional>
#include <string>

#include "examples/moe_trainer/model/pass.hpp"

namespace terrace::trainer {

// Declares `layer.<layer>.<group>`; the same operator of all layers shares the group, and so a measured cost.
struct SiteName {
  int layer;
  const char* group;  // "kda.q"
  SiteKind kind;
};
[[nodiscard]] SiteId declare_site(Session& session, const SiteName& name);

enum class Reads : std::uint8_t { kInBackward, kInForwardOnly };

// The output (rows, width) of a site.
//   forward    computed; offered to the session if layers are recomputed and backward reads it
//   recompute  what the session kept, or else computed
// `compute(out)` launches on the pass's stream and writes all of `out`.
template <typename Compute>
[[nodiscard]] Tensor site_output(const Pass& pass, SiteId site, Reads reads, std::int64_t rows,
                                 std::int64_t width, Compute&& compute) {
  const SiteKey key{site, pass.micro_batch};
  if (pass.phase == Phase::kRecompute) {
    if (BlockRef kept = pass.session.fetch(key)) return Tensor::over(std::move(kept), rows, width);
  }
  Tensor out = pass.memory.tensor(rows, width);
  if (pass.recompute == Recompute::kNone) {
    compute(out);
    return out;
  }
  {
    const Session::Timing timing(pass.session, site);
    compute(out);
  }
  if (pass.phase == Phase::kForward && reads == Reads::kInBackward) pass.session.offer(key, out.block);
  return out;
}

}  // namespace terrace::trainer
