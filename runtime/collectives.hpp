// Announces collectives on a device to whoever copies in the background across its link: a word that the
// device writes as the collective begins and one as it ends, both in stream order. The host neither waits nor
// calls the kernel.
//
// Announcing is a courtesy: where it fails, or where nobody listens, the collective runs all the same.
#pragma once

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "runtime/device.hpp"
#include "runtime/link_time.hpp"

namespace terrace {

class Collectives {
 public:
  // Of one stream, or of streams that wait for each other; one thread at a time. The device outlives it.
  explicit Collectives(Device& device) : device_(device) {}
  ~Collectives();  // all streams that it was given have come to rest
  Collectives(const Collectives&) = delete;
  Collectives& operator=(const Collectives&) = delete;

  class Announced {
   public:
    Announced() = default;
    Announced(Announced&& other) noexcept;
    Announced& operator=(Announced&&) = delete;
    ~Announced();  // ends here, on the stream

   private:
    friend class Collectives;
    Device* device_ = nullptr;  // null: nothing was announced
    CollectiveLane* lane_ = nullptr;
    Stream stream_;
    std::uint32_t number_ = 0;
  };
  // So that announce() need not: allocates, and pins a page.
  void prepare();
  // What is queued on `stream` while the result lives is a collective.
  [[nodiscard]] Announced announce(Stream stream);

 private:
  void follow_seat();

  Device& device_;
  std::optional<std::size_t> lane_;       // of the process's slot; taken when first needed
  std::optional<std::uint64_t> seating_;  // that reached_ is of
  LinkTime::Seat seat_;
  std::vector<LinkTime::Reach> reaches_;  // the last is the seat's; the device may still write to the others
  std::uint32_t number_ = 0;
};

}  // namespace terrace
