// Whether bytes in DDR leave it as they came.
//
// A thread of its own computes checksums beside the copies: one when a block has arrived, one when it is
// asked for. It is started by the first block that is looked at; where it can't be, the caller's thread
// looks.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <thread>

namespace terrace {

enum class Verify : std::uint8_t { kOff, kSample, kAlways };  // of no block, one in sixteen, every block

class Verifier {
 public:
  explicit Verifier(Verify which) : which_(which) {}
  ~Verifier();
  Verifier(const Verifier&) = delete;
  Verifier& operator=(const Verifier&) = delete;

  struct Check;  // of one block, from its arrival on
  using CheckRef = std::shared_ptr<Check>;

  // The bytes are final, and stay where they are until forget(). Null where this block is not looked at.
  [[nodiscard]] CheckRef arrived(std::span<const std::byte> bytes);
  // The bytes are asked for: they are looked at once more.
  void leaves(const CheckRef& check);
  // Whether every look asked for is over; then intact() does not wait.
  [[nodiscard]] bool looked(const CheckRef& check);
  // Whether all looks saw the same. Waits for them.
  [[nodiscard]] bool intact(const CheckRef& check);
  // Nothing reads the bytes any more once this returns: waits at most for a look under way.
  void forget(const CheckRef& check);

 private:
  void ask(const CheckRef& check);
  void serve(const std::stop_token& stop);
  static void note(Check& check, std::uint64_t seen);

  const Verify which_;
  std::uint64_t blocks_ = 0;
  std::mutex mutex_;  // of all below, and of every check
  std::condition_variable_any changed_;
  std::deque<CheckRef> asked_;
  CheckRef under_way_;
  std::jthread thread_;
};

}  // namespace terrace
