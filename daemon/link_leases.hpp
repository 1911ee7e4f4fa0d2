// Leases of link time: for every device in use, of each direction, among the processes that use it.
//
// Each process has a slot on its user's board (runtime/link_board.hpp). A process alone on its device has the
// whole link and is left alone; where there are more, every kLook what they have used and who was held back
// decides what each needs, link_shares() what each gets, and the boards are written: first what falls, so
// that leases never come to more than the link. A state machine without clock or thread; it reads and writes
// the boards alone.
#pragma once

#include <sys/types.h>

#include <array>
#include <chrono>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "daemon/lease_account.hpp"
#include "daemon/link_shares.hpp"
#include "runtime/link_board.hpp"

namespace terrace {

using LinkAmounts = std::array<std::uint32_t, kLinkDirections>;  // millionths, by direction

// Of a job: how it stands to others, and what others leave it while it needs it.
struct LinkTerms {
  std::uint32_t weight = 1;
  std::uint32_t guarantee = 0;  // millionths of each link and direction
  bool operator==(const LinkTerms&) const = default;
};

class LinkLeases {
 public:
  static constexpr Nanoseconds kLook = std::chrono::milliseconds(20);
  // While nobody copies: then everybody may use all, and who begins is seen by then.
  static constexpr Nanoseconds kIdleLook = 10 * kLook;
  // A device with more processes is looked at less often, which bounds what dividing costs.
  static constexpr std::size_t kCrowd = 8;
  // Who was held back so many looks ago still needs all that it can get.
  static constexpr int kFresh = 3;

  struct Seat {
    int fd = -1;  // the board's; stays ours
    std::size_t slot = 0;
  };
  struct Newcomer {
    std::string device, job;
    uid_t uid = 0;
  };
  // Nothing: its board is full, or there is no memory for one; nobody limits such a process.
  [[nodiscard]] std::optional<Seat> enter(ClientId client, const Newcomer& newcomer, Nanoseconds now);
  // Its time goes to the others, and what it has announced is over. Ignores who has no seat.
  void leave(ClientId client, Nanoseconds now);
  void set_terms(const std::string& job, const LinkTerms& terms);

  // Does what is due.
  void look(Nanoseconds now);
  // Nothing: nobody shares a link.
  [[nodiscard]] std::optional<Nanoseconds> due() const;

  [[nodiscard]] LinkAmounts leased(ClientId client) const;  // zero without a seat

 private:
  struct Use {                // of a direction, by one process
    std::uint32_t spent = 0;  // as read last
    double part = 0;          // of the link's time, lately
    std::uint32_t need = 0;   // millionths, in steps
    LinkShare share;
  };
  struct Member {
    ClientId client;
    std::string job;
    uid_t uid = 0;
    std::size_t slot = 0;
    LinkSlot* page = nullptr;
    std::array<Use, kLinkDirections> uses;
  };
  struct Board {
    std::shared_ptr<LinkBoard> board;
    std::vector<bool> taken = std::vector<bool>(LinkBoard::kSlots);
    std::size_t next = 0;  // where to look for a free slot: one just left may still be written to
  };
  struct Link {
    std::map<uid_t, Board> boards;
    std::vector<Member> members;
    Nanoseconds looked_at{0};
    [[nodiscard]] Nanoseconds period() const;  // of looks while somebody copies
    [[nodiscard]] Nanoseconds next_look() const;
  };

  [[nodiscard]] static std::optional<std::size_t> take_slot(Board& board);
  [[nodiscard]] static bool measure(Link& link, Nanoseconds now);
  void divide(Link& link);
  static void write(Link& link, std::size_t direction, const std::vector<LinkShare>& shares);
  static void note_look(Link& link, Nanoseconds now);

  std::map<std::string, Link> links_;        // by device
  std::map<ClientId, std::string> devices_;  // of those who have a seat
  std::map<std::string, LinkTerms> terms_;   // by job
};

}  // namespace terrace
