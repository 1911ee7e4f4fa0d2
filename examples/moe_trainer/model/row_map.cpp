#include "examples/moe_trainer/model/row_map.hpp"

#include <algorithm>
#include <limits>
#include <stdexcept>

#include "examples/moe_trainer/failure.hpp"

namespace terrace::trainer {

RowMap::RowMap(std::int64_t pieces, const Source& source) : pieces_(pieces) {
  host_.reserve(static_cast<std::size_t>(pieces));
  for (std::int64_t i = 0; i < pieces; ++i) {
    const std::int64_t place = source(i);
    if (place < 0 || place > std::numeric_limits<std::int32_t>::max()) {
      throw std::invalid_argument("a micro-batch is too large for its rows to be counted in 32 bits");
    }
    host_.push_back(static_cast<std::int32_t>(place));
  }
}

void RowMap::allocate(Session& session, Memory& memory) {
  device_ = memory.tensor(1, pieces_, Pool::kWeights);
  Device& device = session.device();
  const PinnedBuffer staging(device, device_.bytes());
  std::copy(host_.begin(), host_.end(), staging.as<std::int32_t>().begin());
  const Status copied = device.copy(session.compute(), Direction::kH2D, device_.block->address,
                                    staging.address(), device_.bytes());
  const Status arrived = device.synchronize(session.compute());  // before the staging buffer goes
  require(copied);
  require(arrived);
  host_ = {};
}

// A copy of bits: pieces of bf16 travel as half as many floats.
void RowMap::gather(const Pass& pass, const Tensor& x, const Tensor& out) const {
  const std::int64_t floats = out.count() / pieces_ * bytes_of(out.dtype) / bytes_of(Dtype::kF32);
  pass.ops.run(pass.stream, GatherRows{.rows = pieces_,
                                       .width = floats,
                                       .top_k = 1,
                                       .source = places(),
                                       .x = x.as<const float>(),
                                       .out = out.as<float>()});
}

void RowMap::gather_sums(const Pass& pass, const Tensor& x, const RowMap& order, const Tensor& out) const {
  const std::int64_t terms = order.pieces_ / out.rows;
  const Tensor gathered = pass.tensor(order.pieces_, out.width);
  gather(pass, x, gathered);
  pass.ops.run(pass.stream, SumRows{.tokens = out.rows,
                                    .width = out.width,
                                    .top_k = terms,
                                    .row = order.places(),
                                    .weight = nullptr,
                                    .x = gathered,
                                    .out = out});
}

const RowMap& RowMaps::get(const std::string& name, std::int64_t pieces, const RowMap::Source& source) {
  const auto found = maps_.find(name);
  return found != maps_.end() ? found->second : maps_.try_emplace(name, pieces, source).first->second;
}

void RowMaps::allocate(Session& session, Memory& memory) {
  for (auto& [name, map] : maps_) map.allocate(session, memory);
}

}  // namespace terrace::trainer
