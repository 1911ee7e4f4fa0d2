#include "runtime/trace/format.hpp"

#include <algorithm>
#include <cstring>

#include "runtime/assert.hpp"

namespace terrace::trace {
namespace {

std::size_t put_number(std::byte* to, std::uint64_t value) noexcept {
  std::size_t length = 0;
  while (value >= 0x80) {
    to[length++] = static_cast<std::byte>((value & 0x7f) | 0x80);
    value >>= 7;
  }
  to[length++] = static_cast<std::byte>(value);
  return length;
}

std::size_t put_name(std::byte* to, std::string_view name) noexcept {
  const std::size_t length = std::min(name.size(), kMostNameBytes);
  to[0] = static_cast<std::byte>(length);
  std::memcpy(to + 1, name.data(), length);
  return 1 + length;
}

}  // namespace

const char* name_of(Layer layer) {
  switch (layer) {
    case Layer::kDriverCalls:
      return "driver calls";
    case Layer::kPool:
      return "pool";
  }
  return "unknown";
}

std::size_t encode_header(std::span<std::byte, kMostHeaderBytes> to, Layer layer,
                          std::string_view device_kind, std::string_view process) noexcept {
  std::memcpy(to.data(), kMagic.data(), kMagic.size());
  to[kMagic.size()] = static_cast<std::byte>(kVersion & 0xff);
  to[kMagic.size() + 1] = static_cast<std::byte>(kVersion >> 8);
  to[kLayerOffset] = static_cast<std::byte>(layer);
  std::size_t length = kLayerOffset + 1;
  length += put_name(to.data() + length, device_kind);
  return length + put_name(to.data() + length, process);
}

std::size_t EventEncoder::encode(std::span<std::byte, kMostEventBytes> to, const Event& event) noexcept {
  const bool allocates = event.kind == Event::Kind::kAllocate;
  TERRACE_DCHECK(allocates ? event.id == allocations_ : event.id < allocations_,
                 "blocks are numbered in order");
  unsigned head = static_cast<unsigned>(event.kind);
  if (event.stream != stream_) head |= tag::kStreamFollows;
  if (event.thread != thread_) head |= tag::kThreadFollows;
  if (allocates) {
    head |= (event.pool ? static_cast<unsigned>(*event.pool) : tag::kPoolUnknown) << tag::kPoolShift;
  }
  std::byte* const at = to.data();
  at[0] = static_cast<std::byte>(head);
  std::size_t length = 1;
  length += put_number(at + length, event.microseconds - microseconds_);
  if ((head & tag::kStreamFollows) != 0) length += put_number(at + length, event.stream);
  if ((head & tag::kThreadFollows) != 0) length += put_number(at + length, event.thread);
  length += put_number(at + length, allocates ? event.size.count() : allocations_ - event.id);
  allocations_ += allocates ? 1 : 0;
  stream_ = event.stream;
  thread_ = event.thread;
  microseconds_ = event.microseconds;
  return length;
}

}  // namespace terrace::trace
