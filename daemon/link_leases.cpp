#include "daemon/link_leases.hpp"

#include <algorithm>
#include <cmath>

#include "runtime/assert.hpp"

namespace terrace {
namespace {

// What a process that is not held back needs: somewhat more than it uses, in steps, so that little changes
// from look to look.
constexpr double kAmple = 1.5;
constexpr std::uint32_t kStep = kLinkWhole / 32;
// Of the link's time; less is nothing.
constexpr double kIdle = 0.001;
// How much of what is known of a process's use is of the last look.
constexpr double kNewest = 0.25;

std::uint32_t need_for(double part) {
  if (part < kIdle) return 0;
  const auto steps = static_cast<std::uint32_t>(std::ceil(part * kAmple * kLinkWhole / kStep));
  return std::min(kLinkWhole, std::max(1U, steps) * kStep);
}

}  // namespace

std::optional<std::size_t> LinkLeases::take_slot(Board& board) {
  for (std::size_t i = 0; i < LinkBoard::kSlots; ++i) {
    const std::size_t slot = (board.next + i) % LinkBoard::kSlots;
    if (board.taken[slot]) continue;
    board.taken[slot] = true;
    board.next = slot + 1;
    return slot;
  }
  return std::nullopt;
}

std::optional<LinkLeases::Seat> LinkLeases::enter(ClientId client, const Newcomer& newcomer,
                                                  Nanoseconds now) {
  TERRACE_CHECK(!devices_.contains(client), "a client has one seat");
  Link& link = links_[newcomer.device];
  Board& board = link.boards[newcomer.uid];
  if (board.board == nullptr) {
    if (auto made = LinkBoard::create()) board.board = *std::move(made);
  }
  const auto slot = board.board == nullptr ? std::nullopt : take_slot(board);
  if (!slot) {
    if (board.board == nullptr) link.boards.erase(newcomer.uid);
    if (link.members.empty()) links_.erase(newcomer.device);
    return std::nullopt;
  }
  Member member{.client = client, .job = newcomer.job, .uid = newcomer.uid, .slot = *slot, .uses = {}};
  member.page = &board.board->slots()[*slot];
  member.page->clear();
  // Of who was alone nothing is known.
  if (link.members.size() == 1) {
    for (std::size_t d = 0; d < kLinkDirections; ++d) {
      Use& use = link.members.front().uses[d];
      use.spent = link.members.front().page->spent[d].load(std::memory_order_relaxed);
      use.part = 1;
      use.need = kLinkWhole;
    }
  }
  link.members.push_back(std::move(member));
  devices_.emplace(client, newcomer.device);
  link.looked_at = now;
  divide(link);
  note_look(link, now);
  return Seat{board.board->fd(), *slot};
}

void LinkLeases::leave(ClientId client, Nanoseconds now) {
  const auto known = devices_.find(client);
  if (known == devices_.end()) return;
  const auto found = links_.find(known->second);
  Link& link = found->second;
  devices_.erase(known);
  const auto gone = std::find_if(link.members.begin(), link.members.end(),
                                 [client](const Member& member) { return member.client == client; });
  gone->page->clear();
  Board& board = link.boards.at(gone->uid);
  board.taken[gone->slot] = false;
  const uid_t uid = gone->uid;
  link.members.erase(gone);
  if (link.members.empty()) {
    links_.erase(found);
    return;
  }
  if (std::none_of(link.members.begin(), link.members.end(),
                   [uid](const Member& member) { return member.uid == uid; }))
    link.boards.erase(uid);
  divide(link);
  note_look(link, now);
}

void LinkLeases::set_terms(const std::string& job, const LinkTerms& terms) {
  LinkTerms& kept = terms_[job];
  if (kept == terms) return;
  kept = terms;
  for (auto& [device, link] : links_) divide(link);
}

// Whether anybody's need has changed.
bool LinkLeases::measure(Link& link, Nanoseconds now) {
  const double span = std::max(seconds_of(now - link.looked_at), 1e-6) * 1e6;
  bool changed = false;
  for (Member& member : link.members) {
    for (std::size_t d = 0; d < kLinkDirections; ++d) {
      Use& use = member.uses[d];
      const std::uint32_t spent = member.page->spent[d].load(std::memory_order_relaxed);
      const double part = std::min(1.0, (spent - use.spent) / span);  // the difference wraps as the word does
      use.spent = spent;
      use.part += kNewest * (part - use.part);
      const std::uint64_t limited = member.page->limited_at[d].load(std::memory_order_relaxed);
      const auto at = static_cast<std::uint64_t>(now.count());
      const auto fresh = static_cast<std::uint64_t>((kFresh * link.period()).count());
      const bool held_back = limited != 0 && limited <= at && at - limited < fresh;
      const std::uint32_t need = held_back ? kLinkWhole : need_for(use.part);
      changed = changed || need != use.need;
      use.need = need;
    }
  }
  link.looked_at = now;
  return changed;
}

void LinkLeases::divide(Link& link) {
  std::map<std::string, std::size_t> jobs;
  for (const Member& member : link.members) jobs.try_emplace(member.job, jobs.size());
  const bool alone = link.members.size() == 1;
  for (std::size_t d = 0; d < kLinkDirections; ++d) {
    std::vector<LinkClaim> claims;
    for (const Member& member : link.members) {
      const auto terms = terms_.find(member.job);
      const LinkTerms& of_job = terms == terms_.end() ? LinkTerms{} : terms->second;
      claims.push_back({.job = jobs.at(member.job),
                        .weight = of_job.weight,
                        .guarantee = of_job.guarantee,
                        .need = alone ? kLinkWhole : member.uses[d].need});
    }
    write(link, d, link_shares(claims));
  }
}

void LinkLeases::write(Link& link, std::size_t direction, const std::vector<LinkShare>& shares) {
  const auto write_one = [&](std::size_t i) {
    Member& member = link.members[i];
    member.uses[direction].share = shares[i];
    member.page->lease[direction].store(shares[i].lease, std::memory_order_relaxed);
    member.page->usable[direction].store(shares[i].usable, std::memory_order_relaxed);
  };
  const auto rises = [&](std::size_t i) {
    return shares[i].lease > link.members[i].uses[direction].share.lease;
  };
  std::vector<std::size_t> rising;
  for (std::size_t i = 0; i < shares.size(); ++i) rises(i) ? rising.push_back(i) : write_one(i);
  for (const std::size_t i : rising) write_one(i);
}

void LinkLeases::note_look(Link& link, Nanoseconds now) {
  for (auto& [uid, board] : link.boards) board.board->note_look(now);
}

Nanoseconds LinkLeases::Link::period() const {
  return kLook * static_cast<Nanoseconds::rep>(std::max<std::size_t>(1, members.size() / kCrowd));
}

Nanoseconds LinkLeases::Link::next_look() const {
  const bool idle = std::all_of(members.begin(), members.end(), [](const Member& member) {
    return member.uses[0].need == 0 && member.uses[1].need == 0;
  });
  return looked_at + (idle ? kIdleLook : period());
}

void LinkLeases::look(Nanoseconds now) {
  for (auto& [device, link] : links_) {
    if (link.members.size() < 2 || now < link.next_look()) continue;
    if (measure(link, now)) divide(link);
    note_look(link, now);
  }
}

std::optional<Nanoseconds> LinkLeases::due() const {
  std::optional<Nanoseconds> first;
  for (const auto& [device, link] : links_) {
    if (link.members.size() < 2) continue;
    const Nanoseconds next = link.next_look();
    if (!first || next < *first) first = next;
  }
  return first;
}

LinkAmounts LinkLeases::leased(ClientId client) const {
  const auto device = devices_.find(client);
  if (device == devices_.end()) return {};
  for (const Member& member : links_.at(device->second).members) {
    if (member.client == client) return {member.uses[0].share.lease, member.uses[1].share.lease};
  }
  return {};
}

}  // namespace terrace
