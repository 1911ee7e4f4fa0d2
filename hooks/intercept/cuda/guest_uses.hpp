// The uses that one call of the guest makes of blocks of stable addresses: taken before the driver is asked,
// dropped when it has answered.
//
// A launch uses what its parameters lead to, and what a library call around it was given (LibraryArguments).
// What it uses of a block in DDR is brought back first. A copy uses its two ends where they lie. A launch
// whose pointers cannot all be named uses everything.
//
// In a steady state nothing here takes a lock, allocates or asks the system. Nothing throws.
#pragma once

#include <span>

#include "hooks/intercept/cuda/launch_view.hpp"
#include "hooks/intercept/cuda/stable_blocks.hpp"

namespace terrace::hooks::cuda {

struct UseSeat;

class GuestUses {
 public:
  GuestUses() noexcept = default;
  ~GuestUses() {
    if (seat_ != nullptr) end();
  }
  GuestUses(const GuestUses&) = delete;
  GuestUses& operator=(const GuestUses&) = delete;

  // Each at most once for an object, and nothing where the process has no such blocks.
  void launch(const Launch& launch, StreamName stream) noexcept {
    if (stable_blocks().any()) take_launch(launch, stream);
  }
  void copy(StreamName stream, std::span<const DevicePointer> ends) noexcept {
    if (stable_blocks().any()) take_copy(stream, ends);
  }
  void everything(StreamName stream) noexcept {
    if (stable_blocks().any()) take_everything(stream);
  }

 private:
  void take_launch(const Launch& launch, StreamName stream) noexcept;
  void take_copy(StreamName stream, std::span<const DevicePointer> ends) noexcept;
  void take_everything(StreamName stream) noexcept;
  enum class Absent : std::uint8_t { kBring, kLeave };
  void take(StreamHandle stream, Absent absent);
  void take_all(StreamHandle stream);
  static void without_memory(StreamName stream) noexcept;
  void end() noexcept;

  UseSeat* seat_ = nullptr;
  StreamHandle stream_ = nullptr;
};

// What the library call that this thread is in was given, as words that may be addresses.
enum class Reach : std::uint8_t { kArguments, kEverything };
class LibraryArguments {
 public:
  LibraryArguments(std::span<const std::uint64_t> words, Reach reach) noexcept
      : words_(words), reach_(reach), before_(here_) {
    here_ = this;
  }
  ~LibraryArguments() { here_ = before_; }
  LibraryArguments(const LibraryArguments&) = delete;
  LibraryArguments& operator=(const LibraryArguments&) = delete;
  // Calls visit(word) for each, of every call around.
  template <typename Visit>
  static void each_word(const Visit& visit) noexcept {
    for (const LibraryArguments* call = here_; call != nullptr; call = call->before_) {
      for (const std::uint64_t word : call->words_) visit(word);
    }
  }
  [[nodiscard]] static bool under_way() noexcept { return here_ != nullptr; }
  [[nodiscard]] static Reach reach() noexcept {
    for (const LibraryArguments* call = here_; call != nullptr; call = call->before_) {
      if (call->reach_ == Reach::kEverything) return Reach::kEverything;
    }
    return Reach::kArguments;
  }

 private:
  const std::span<const std::uint64_t> words_;
  const Reach reach_;
  const LibraryArguments* const before_;
  static inline thread_local constinit const LibraryArguments* here_ = nullptr;
};

// A forked child's thread has no seat.
void forget_seat_in_child() noexcept;

}  // namespace terrace::hooks::cuda
