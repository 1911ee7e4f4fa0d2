// Lists of positions to and from their short forms, and turned round, a row at a time.
#include <algorithm>

#include "examples/moe_trainer/ops/cpu/kernels.hpp"
#include "examples/moe_trainer/ops/cpu/parallel.hpp"

namespace terrace::trainer::cpu {
namespace {

constexpr std::int64_t kGrain = 64;  // rows
constexpr std::uint16_t kLonePadding = 0xFFFF;

std::int64_t count_of(const std::int32_t* row, std::int64_t slots) {
  return std::find_if(row, row + slots, [](std::int32_t position) { return position < 0; }) - row;
}

void pack_short(const std::int32_t* row, std::int64_t slots, std::uint16_t* out) {
  const std::int64_t count = count_of(row, slots);
  for (std::int64_t j = 0; j < count; ++j) out[j] = static_cast<std::uint16_t>(row[j]);
  std::fill(out + count, out + slots, count > 0 ? out[count - 1] : std::uint16_t{0});
  if (count == 0) out[0] = slots == 1 ? kLonePadding : std::uint16_t{1};
}

void unpack_short(const std::uint16_t* row, std::int64_t slots, std::int32_t* out) {
  const bool empty = slots == 1 ? row[0] == kLonePadding : row[1] < row[0];
  out[0] = empty ? -1 : row[0];
  for (std::int64_t j = 1; j < slots; ++j) out[j] = row[j] > row[j - 1] && !empty ? row[j] : -1;
}

void pack_bits(const std::int32_t* row, const IndexLists& lists, std::uint32_t* out) {
  std::fill_n(out, bitmap_words(lists), 0U);
  const std::int64_t count = count_of(row, lists.slots);
  for (std::int64_t j = 0; j < count; ++j) out[row[j] / 32] |= 1U << (row[j] % 32);
}

void unpack_bits(const std::uint32_t* row, const IndexLists& lists, std::int32_t* out) {
  std::int64_t count = 0;
  for (std::int64_t word = 0; word < bitmap_words(lists); ++word) {
    for (std::uint32_t bits = row[word]; bits != 0; bits &= bits - 1) {
      out[count++] = static_cast<std::int32_t>(word * 32 + __builtin_ctz(bits));
    }
  }
  std::fill(out + count, out + lists.slots, -1);
}

void map_keys(const std::int32_t* row, std::int64_t slots, std::int64_t words, KeyWord* out) {
  const std::int64_t count = count_of(row, slots);
  std::int64_t slot = 0;
  for (std::int64_t word = 0; word < words; ++word) {
    out[word] = {0, static_cast<std::int32_t>(slot)};
    for (; slot < count && row[slot] < (word + 1) * 32; ++slot) out[word].bits |= 1U << (row[slot] % 32);
  }
}

}  // namespace

void compute(const MapKeys& op, std::byte*) {
  const std::int64_t slots = op.shape.slots(), words = key_map_words(op.shape.length);
  parallel_ranges(op.shape.batch * op.shape.length, kGrain, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t row = begin; row < end; ++row) {
      map_keys(op.selected + row * slots, slots, words, op.words + row * words);
    }
  });
}

void compute(const PackIndices& op, std::byte*) {
  const IndexLists& lists = op.lists;
  const IndexForm form = index_form(lists);
  if (lists.slots <= 0) return;
  parallel_ranges(lists.rows, kGrain, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t row = begin; row < end; ++row) {
      const std::int32_t* from = op.selected + row * lists.slots;
      switch (form) {
        case IndexForm::kList:
          std::copy_n(from, lists.slots, reinterpret_cast<std::int32_t*>(op.packed) + row * lists.slots);
          break;
        case IndexForm::kShortList:
          pack_short(from, lists.slots, reinterpret_cast<std::uint16_t*>(op.packed) + row * lists.slots);
          break;
        case IndexForm::kBitmap:
          pack_bits(from, lists, reinterpret_cast<std::uint32_t*>(op.packed) + row * bitmap_words(lists));
          break;
      }
    }
  });
}

void compute(const UnpackIndices& op, std::byte*) {
  const IndexLists& lists = op.lists;
  const IndexForm form = index_form(lists);
  if (lists.slots <= 0) return;
  parallel_ranges(lists.rows, kGrain, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t row = begin; row < end; ++row) {
      std::int32_t* to = op.selected + row * lists.slots;
      switch (form) {
        case IndexForm::kList:
          std::copy_n(reinterpret_cast<const std::int32_t*>(op.packed) + row * lists.slots, lists.slots, to);
          break;
        case IndexForm::kShortList:
          unpack_short(reinterpret_cast<const std::uint16_t*>(op.packed) + row * lists.slots, lists.slots,
                       to);
          break;
        case IndexForm::kBitmap:
          unpack_bits(reinterpret_cast<const std::uint32_t*>(op.packed) + row * bitmap_words(lists), lists,
                      to);
          break;
      }
    }
  });
}

}  // namespace terrace::trainer::cpu
