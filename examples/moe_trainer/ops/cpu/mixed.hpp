// bf16 for operators that compute in fp32: every bf16 array of an operator gets an fp32 stand-in in scratch.
//
// An operator says where its arrays are by an overload beside its struct (ops/*.hpp):
//   template <typename F> void visit_arrays(Op& op, F&& visit);   // visit(op.x, count) for each In and Out
// StandIns collects the bf16 ones, puts the stand-ins' addresses into a copy of the operator, converts all of
// them on the way in and the written ones on the way out. What the operator leaves unwritten keeps its value:
// outputs are converted in as well, which serves those that add, too. Arrays that overlap share one stand-in,
// so in place stays in place and halves of one matrix stay halves. Null arrays stay null.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "examples/moe_trainer/ops/array.hpp"
#include "examples/moe_trainer/ops/cpu/parallel.hpp"
#include "examples/moe_trainer/ops/linear.hpp"
#include "runtime/units.hpp"

namespace terrace::trainer::cpu {

inline constexpr std::int64_t kConvertGrain = 1 << 14;

inline void widen(const Bf16* from, float* to, std::int64_t count) {
  parallel_ranges(count, kConvertGrain, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) to[i] = to_float(from[i]);
  });
}
// To nearest, ties to even; NaN stays NaN. Without branches, so that the compiler takes eight at a time.
inline void narrow(const float* from, Bf16* to, std::int64_t count) {
  parallel_ranges(count, kConvertGrain, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      std::uint32_t bits = 0;
      std::memcpy(&bits, from + i, sizeof bits);
      const std::uint32_t quiet = (bits >> 16) | 0x40U;
      const std::uint32_t nearest = (bits + 0x7FFFU + ((bits >> 16) & 1U)) >> 16;
      const bool nan = (bits & 0x7FFFFFFFU) > 0x7F800000U;
      to[i].bits = static_cast<std::uint16_t>(nan ? quiet : nearest);
    }
  });
}

class StandIns {
 public:
  // Collects; once all arrays have been shown, bytes() is known.
  void operator()(const In& array, std::int64_t count) { collect(array, count, Use::kRead); }
  void operator()(const Out& array, std::int64_t count) { collect(array, count, Use::kWritten); }
  void operator()(const Out& array, std::int64_t count, Accumulate) { (*this)(array, count); }

  [[nodiscard]] Bytes bytes() const {
    std::uint64_t floats = 0;
    for (const Range& range : ranges_) floats += padded(range);
    return Bytes(floats * sizeof(float));
  }
  void set_base(std::byte* base) {
    auto* next = reinterpret_cast<float*>(base);
    for (Range& range : ranges_) {
      range.stand_in = next;
      next += padded(range);
    }
  }

  // Puts the stand-ins in the arrays' place.
  class Replace {
   public:
    explicit Replace(const StandIns& stand_ins) : stand_ins_(stand_ins) {}
    void operator()(In& array, std::int64_t) { put(array); }
    void operator()(Out& array, std::int64_t) { put(array); }
    void operator()(Out& array, std::int64_t, Accumulate) { put(array); }

   private:
    template <typename Array>
    void put(Array& array) {
      if (array.dtype() == Dtype::kBf16) array = array ? Array(stand_ins_.of(array)) : Array(nullptr);
    }
    const StandIns& stand_ins_;
  };

  void convert_in() const {
    for (const Range& range : ranges_) widen(range.begin, range.stand_in, range.end - range.begin);
  }
  void convert_out() const {
    for (const Range& range : ranges_) {
      if (range.use == Use::kRead) continue;
      narrow(range.stand_in, const_cast<Bf16*>(range.begin), range.end - range.begin);
    }
  }

 private:
  enum class Use : std::uint8_t { kRead, kWritten };
  struct Range {  // given as writable where use says so
    const Bf16* begin;
    const Bf16* end;
    Use use;
    float* stand_in = nullptr;
  };
  [[nodiscard]] static std::uint64_t padded(const Range& range) {
    constexpr std::uint64_t kStep = 64 / sizeof(float);
    return (static_cast<std::uint64_t>(range.end - range.begin) + kStep - 1) / kStep * kStep;
  }

  void collect(In array, std::int64_t count, Use use) {
    if (!array || array.dtype() == Dtype::kF32) return;
    Range whole{array.as<Bf16>(), array.as<Bf16>() + std::max<std::int64_t>(count, 0), use};
    std::erase_if(ranges_, [&](const Range& other) {
      const bool same_start = other.begin == whole.begin;
      if (!same_start && (other.end <= whole.begin || whole.end <= other.begin)) return false;
      whole = {std::min(whole.begin, other.begin), std::max(whole.end, other.end),
               std::max(whole.use, other.use)};
      return true;
    });
    ranges_.push_back(whole);
  }
  [[nodiscard]] float* of(In array) const {
    const auto* at = array.as<Bf16>();
    const auto found = std::find_if(ranges_.begin(), ranges_.end(), [at](const Range& range) {
      return at == range.begin || (range.begin < at && at < range.end);
    });
    return found->stand_in + (at - found->begin);
  }

  std::vector<Range> ranges_;
};

}  // namespace terrace::trainer::cpu
