// A peer that gives out addresses without memory and checks how it is used. When closed, it writes what it
// saw as JSON to the file that CHECKED_PEER_REPORT names. CHECKED_PEER_LARGEST: blocks above so many bytes
// are refused. CHECKED_PEER_ABI: the version of the plugin interface that it claims.
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <map>
#include <mutex>
#include <set>
#include <thread>

#include "bench/peers/table.hpp"

namespace {

std::size_t number_in(const char* variable, std::size_t otherwise) {
  const char* text = std::getenv(variable);
  return text != nullptr ? std::strtoull(text, nullptr, 10) : otherwise;
}

class CheckedPeer {
 public:
  static std::unique_ptr<CheckedPeer> open(int device, std::size_t /*budget*/, std::string& why) {
    if (device < 0) return std::make_unique<CheckedPeer>();
    why = "it is for host memory";
    return nullptr;
  }
  CheckedPeer() = default;
  CheckedPeer(const CheckedPeer&) = delete;
  CheckedPeer& operator=(const CheckedPeer&) = delete;
  ~CheckedPeer() {
    const char* file = std::getenv("CHECKED_PEER_REPORT");
    if (file == nullptr) return;
    std::ofstream(file) << "{\"allocations\": " << allocations_ << ", \"live\": " << live_.size()
                        << ", \"most_live\": " << most_live_ << ", \"streams\": " << owners_.size()
                        << ", \"sizes\": " << sizes_.size() << ", \"wrong\": " << wrong_ << "}\n";
  }

  void* new_stream() {
    const std::lock_guard lock(mutex_);
    auto* stream = reinterpret_cast<void*>(owners_.size() + 1);
    owners_.emplace(stream, std::this_thread::get_id());
    return stream;
  }
  void* allocate(std::size_t bytes, void* stream) {
    const std::lock_guard lock(mutex_);
    if (bytes > largest_) return nullptr;
    check(stream);
    sizes_.insert(bytes);
    auto* address = reinterpret_cast<void*>(++allocations_ << 12);
    live_.emplace(address, Live{bytes, stream});
    most_live_ = std::max(most_live_, live_.size());
    return address;
  }
  void release(void* address, std::size_t bytes, void* stream) {
    const std::lock_guard lock(mutex_);
    check(stream);
    const auto found = live_.find(address);
    if (found == live_.end() || found->second.bytes != bytes || found->second.stream != stream) {
      ++wrong_;
    } else {
      live_.erase(found);
    }
  }
  std::size_t reserved() { return 0; }

 private:
  struct Live {
    std::size_t bytes;
    void* stream;
  };
  // A stream is used by the thread that asked for it, and by no other.
  void check(void* stream) {
    const auto owner = owners_.find(stream);
    if (owner == owners_.end() || owner->second != std::this_thread::get_id()) ++wrong_;
  }

  const std::size_t largest_ = number_in("CHECKED_PEER_LARGEST", SIZE_MAX);
  std::mutex mutex_;
  std::map<void*, std::thread::id> owners_;
  std::map<void*, Live> live_;
  std::set<std::size_t> sizes_;
  std::uint64_t allocations_ = 0;
  std::size_t most_live_ = 0;
  std::uint64_t wrong_ = 0;
};

}  // namespace

extern "C" const terrace::bench::AllocatorPlugin* terrace_allocator_plugin() {
  static const terrace::bench::AllocatorPlugin table = [] {
    auto filled = terrace::bench::table_for<CheckedPeer>("checked");
    filled.abi = static_cast<unsigned>(number_in("CHECKED_PEER_ABI", filled.abi));
    return filled;
  }();
  return &table;
}
