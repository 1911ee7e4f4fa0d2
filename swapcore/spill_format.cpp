#include "swapcore/spill_format.hpp"

#include <utility>

#include "runtime/assert.hpp"
#include "runtime/metrics.hpp"

namespace terrace {
namespace {

constexpr Bytes kSums{sizeof(Fp8Error)};
constexpr double kPerMillion = 1e6;

std::uint64_t element_bytes(Element element) { return element == Element::kF32 ? 4 : 2; }

}  // namespace

Bytes travel_bytes(SpillFormat format, Bytes size, Element element) {
  if (format == SpillFormat::kExact || element == Element::kOpaque) return size;
  if (size.count() % element_bytes(element) != 0) return size;
  return std::min(size, Bytes(fp8_bytes(size.count() / element_bytes(element))));
}

SpillPacker::SpillPacker(const Parts& parts) : parts_(parts) {
  const auto sums = parts.hbm.allocate(parts.compute, kSums, Pool::kScratch);
  if (!sums) return;
  sums_ = *sums;
  const auto answer = parts.ddr.allocate(kSums, Pool::kScratch);
  if (answer) answer_ = *answer;
  const auto answered = parts.device.create_event();
  if (answered) answered_ = *answered;
  if (!answer || !answered || !parts.device.fill(parts.compute, sums->address, 0, kSums)) forget_error();
}

SpillPacker::~SpillPacker() {
  if (asked_) (void)parts_.device.synchronize(*answered_);
  forget_error();
}

void SpillPacker::forget_error() {
  if (sums_) (void)parts_.hbm.free(parts_.compute, *sums_);
  if (answer_) (void)parts_.ddr.free(*answer_);
  if (answered_) parts_.device.destroy_event(*answered_);
  sums_.reset();
  answer_.reset();
  answered_.reset();
}

Result<BlockRef> SpillPacker::pack(const EntryKey& key, const Block& output, Element element,
                                   const std::function<BlockRef(const Block&)>& wrap) {
  const std::uint64_t count = output.size.count() / element_bytes(element);
  const auto room = parts_.hbm.allocate(parts_.compute, Bytes(fp8_bytes(count)), output.pool);
  if (!room) return room.error();
  BlockRef packed = wrap(*room);
  Fp8Error* const sums = sums_ ? reinterpret_cast<Fp8Error*>(sums_->address) : nullptr;
  if (Status done =
          parts_.device.pack_fp8(parts_.compute, {element, count, output.address, packed->address, sums});
      !done)
    return done.error();
  packed_[key] = {element, output.size};
  packed_since_ = true;
  return packed;
}

std::optional<Bytes> SpillPacker::unpacked_size(const EntryKey& key) const {
  const auto found = packed_.find(key);
  return found == packed_.end() ? std::nullopt : std::optional(found->second.size);
}

Status SpillPacker::unpack(const EntryKey& key, const Block& packed, const Block& output) {
  const auto found = packed_.find(key);
  TERRACE_CHECK(found != packed_.end() && found->second.size == output.size,
                "what was packed is unpacked once, to its own size");
  const Packed how = found->second;
  packed_.erase(found);
  return parts_.device.unpack_fp8(parts_.compute, {how.element, how.size.count() / element_bytes(how.element),
                                                   output.address, packed.address, nullptr});
}

void SpillPacker::forget_all() { packed_.clear(); }

void SpillPacker::ask_for_error() {
  if (!packed_since_ || !sums_ || asked_) return;
  packed_since_ = false;
  const Status copied =
      parts_.device.copy(parts_.compute, Direction::kD2H, answer_->address, sums_->address, kSums);
  if (copied) asked_ = parts_.device.record(parts_.compute, *answered_).ok();
  // Where nothing says when the bytes have stopped moving, nobody may use them any more.
  if (!asked_) (void)parts_.device.synchronize(parts_.compute);
}

SpillPacker::Error SpillPacker::error() {
  if (!asked_ || !parts_.device.completed(*answered_)) return error_;
  asked_ = false;
  const auto* const sums = reinterpret_cast<const Fp8Error*>(answer_->address);
  error_.largest = static_cast<double>(sums->largest_share);
  error_.mean = sums->magnitude_sum > 0 ? sums->error_sum / sums->magnitude_sum : 0;
  metrics().set<Metric::kSpillErrorLargest>(static_cast<std::uint64_t>(error_.largest * kPerMillion));
  metrics().set<Metric::kSpillErrorMean>(static_cast<std::uint64_t>(error_.mean * kPerMillion));
  return error_;
}

}  // namespace terrace
