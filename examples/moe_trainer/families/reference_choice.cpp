#include "examples/moe_trainer/families/reference_choice.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>
#include <vector>

#include "examples/moe_trainer/host_copy.hpp"

namespace terrace::trainer {

namespace {

using Scored = std::pair<float, std::int32_t>;

// The positions of a row's `slots` best scores, ascending, then -1; the future, which scores -inf, is not
// chosen.
void choose_row(const float* scores, std::int64_t length, std::int64_t slots, std::int32_t* selected) {
  constexpr std::int64_t kPartialSort = 64;  // from so many times k on, the library sorts the front instead
  std::vector<Scored> row;
  for (std::int64_t s = 0; s < length; ++s) row.emplace_back(scores[s], static_cast<std::int32_t>(s));
  const auto better = [](const Scored& a, const Scored& b) { return a.first > b.first; };
  if (slots * kPartialSort <= length) {
    std::partial_sort(row.begin(), row.begin() + slots, row.end(), better);
  } else {
    std::nth_element(row.begin(), row.begin() + slots - 1, row.end(), better);
  }
  std::vector<std::int32_t> chosen;
  for (std::int64_t i = 0; i < slots; ++i) {
    const Scored& each = row[static_cast<std::size_t>(i)];
    if (!std::isinf(each.first)) chosen.push_back(each.second);
  }
  std::sort(chosen.begin(), chosen.end());
  std::fill(selected, selected + slots, -1);
  std::copy(chosen.begin(), chosen.end(), selected);
}

}  // namespace

void ReferenceChoice::choose(const DsaSelect& select) const {
  const DsaShape& shape = select.shape;
  const std::int64_t rows = shape.batch * shape.length;
  const Tensor scores = memory_.tensor(rows, shape.length);
  DsaSelect scored = select;
  scored.scores = scores.f32();
  ops_.run(session_.compute(), scored);
  const std::vector<float> host = download(session_, scores.f32(), scores.count());
  const std::int64_t slots = shape.slots();
  std::vector<std::int32_t> selected(static_cast<std::size_t>(rows * slots));
  for (std::int64_t row = 0; row < rows; ++row) {
    choose_row(host.data() + row * shape.length, shape.length, slots, selected.data() + row * slots);
  }
  std::vector<float> bits(selected.size());
  std::memcpy(bits.data(), selected.data(), selected.size() * sizeof(float));
  upload(session_, bits, reinterpret_cast<float*>(select.selected));
}

}  // namespace terrace::trainer
