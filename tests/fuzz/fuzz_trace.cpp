// A recorded trace: any bytes are refused in words, or give events within the bounds of the format.
#include <algorithm>
#include <cstring>

#include "runtime/trace/reader.hpp"
#include "tests/fuzz/target.hpp"

using namespace terrace;

namespace {

class InputSource final : public trace::ByteSource {
 public:
  explicit InputSource(std::span<const std::byte> left) : left_(left) {}
  Result<std::size_t> read(std::span<std::byte> to) override {
    const std::size_t count = std::min(to.size(), left_.size());
    if (count > 0) std::memcpy(to.data(), left_.data(), count);
    left_ = left_.subspan(count);
    return count;
  }

 private:
  std::span<const std::byte> left_;
};

}  // namespace

int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::span input(reinterpret_cast<const std::byte*>(data), size);
  auto reader = trace::Reader::open(std::make_unique<InputSource>(input), "fuzz");
  if (!reader) {
    HOLDS(reader.error().text.starts_with("fuzz"));
    return 0;
  }
  for (;;) {
    const auto event = reader->next();
    if (!event) {
      HOLDS(event.error().text.starts_with("fuzz"));
      return 0;
    }
    if (!*event) return 0;
    HOLDS((*event)->size <= trace::kLargestBlock);
    HOLDS(reader->live_blocks() <= trace::kMostLiveBlocks);
  }
}
