// Rows to experts: a counting sort, stable in t * top_k + j. Some ten thousand slots at most: not worth a
// second thread.
#include <algorithm>
#include <stdexcept>
#include <vector>

#include "examples/moe_trainer/ops/cpu/kernels.hpp"
#include "runtime/assert.hpp"

namespace terrace::trainer::cpu {
namespace {

std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

// Slots by expert, ascending within each.
struct Sorted {
  std::vector<std::int64_t> starts;  // (experts + 1)
  std::vector<std::int32_t> slots;
};

Sorted sort_slots(const Permute& op) {
  Sorted sorted{std::vector<std::int64_t>(at(op.experts + 1), 0), {}};
  const std::int64_t slots = op.tokens * op.top_k;
  for (std::int64_t i = 0; i < slots; ++i) {
    TERRACE_CHECK(op.expert[i] < op.experts, "a slot names an expert or none");
    if (op.expert[i] >= 0) ++sorted.starts[at(op.expert[i] + 1)];
  }
  for (std::int64_t e = 0; e < op.experts; ++e) sorted.starts[at(e + 1)] += sorted.starts[at(e)];
  sorted.slots.resize(at(sorted.starts.back()));
  std::vector<std::int64_t> next(sorted.starts.begin(), sorted.starts.end() - 1);
  for (std::int64_t i = 0; i < slots; ++i) {
    if (op.expert[i] >= 0) sorted.slots[at(next[at(op.expert[i])]++)] = static_cast<std::int32_t>(i);
  }
  return sorted;
}

// Keeps the `capacity` slots of highest weight, of equal ones the earlier, in their order. NaN is lowest.
void drop_overflow(const Permute& op, std::vector<std::int32_t>& slots) {
  if (op.capacity <= 0 || static_cast<std::int64_t>(slots.size()) <= op.capacity) return;
  const auto better = [&](std::int32_t a, std::int32_t b) {
    const float x = op.weight[a], y = op.weight[b];
    if (x > y || (x == x && y != y)) return true;
    if (y > x || (y == y && x != x)) return false;
    return a < b;
  };
  const auto end = slots.begin() + op.capacity;
  std::nth_element(slots.begin(), end, slots.end(), better);
  slots.erase(end, slots.end());
  std::sort(slots.begin(), slots.end());
}

}  // namespace

Bytes scratch_bytes(const Permute& op) {
  const std::int64_t places = op.places > 0 ? op.places : op.experts;
  if (op.experts < 1 || op.experts > Permute::kMostExperts || places > Permute::kMostExperts) {
    throw std::runtime_error("permute: 1 to 4096 experts, and as many places");
  }
  if (op.capacity > 0 && op.weight == nullptr) {
    throw std::runtime_error("permute: a capacity needs weights to choose by");
  }
  if (op.tokens * op.top_k > 0x7fffffff) throw std::runtime_error("permute: more slots than 32 bits count");
  return Bytes();
}

void compute(const Permute& op, std::byte*) {
  const std::int64_t places = op.places > 0 ? op.places : op.experts;
  const Sorted sorted = sort_slots(op);
  std::fill_n(op.row, op.tokens * op.top_k, -1);
  std::fill_n(op.source, op.tokens * op.top_k, -1);
  std::vector<std::vector<std::int32_t>> slots_of(at(places));
  for (std::int64_t e = 0; e < op.experts; ++e) {
    std::vector<std::int32_t> slots(sorted.slots.begin() + sorted.starts[at(e)],
                                    sorted.slots.begin() + sorted.starts[at(e + 1)]);
    if (op.counts != nullptr) op.counts[e] = static_cast<std::int32_t>(slots.size());
    drop_overflow(op, slots);
    if (op.places == 0) {
      slots_of[at(e)] = std::move(slots);
      continue;
    }
    const std::int32_t first = op.replica_starts[e], replicas = op.replica_starts[e + 1] - first;
    for (std::size_t rank = 0; rank < slots.size(); ++rank) {
      const std::int32_t turn = static_cast<std::int32_t>(rank % static_cast<std::size_t>(replicas));
      slots_of[at(op.replicas[first + turn])].push_back(slots[rank]);
    }
  }
  std::int32_t row = 0;
  for (std::int64_t place = 0; place < places; ++place) {
    op.offsets[place] = row;
    for (const std::int32_t slot : slots_of[at(place)]) {
      op.row[slot] = row;
      op.source[row++] = slot;
    }
  }
  op.offsets[places] = row;
}

}  // namespace terrace::trainer::cpu
