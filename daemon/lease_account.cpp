#include "daemon/lease_account.hpp"

#include <algorithm>

#include "runtime/assert.hpp"

namespace terrace {
namespace {

__extension__ using Wide = unsigned __int128;  // products of two amounts
// Nobody waits for more, so that sums over all clients are amounts.
constexpr Bytes kMostWaiting = Bytes(1ULL << 50);

}  // namespace

LeaseAccount::Member& LeaseAccount::member(ClientId client) {
  const auto found = std::find_if(members_.begin(), members_.end(),
                                  [client](const Member& member) { return member.client == client; });
  TERRACE_CHECK(found != members_.end(), "the client has entered and not left");
  return *found;
}

const LeaseAccount::Member* LeaseAccount::find(ClientId client) const {
  for (const Member& member : members_) {
    if (member.client == client) return &member;
  }
  return nullptr;
}

LeaseAccount::Terms LeaseAccount::terms_of(const std::string& job) const {
  const auto found = terms_.find(job);
  return found == terms_.end() ? Terms{} : found->second;
}

void LeaseAccount::enter(ClientId client, const std::string& job, Bytes held) {
  TERRACE_CHECK(find(client) == nullptr, "a client enters once");
  Member member;
  member.client = client;
  member.job = job;
  member.leased = std::min(held, budget_);
  leased_ += member.leased;
  members_.push_back(std::move(member));
  changed_ = true;
}

void LeaseAccount::leave(ClientId client) {
  const auto gone = std::find_if(members_.begin(), members_.end(),
                                 [client](const Member& member) { return member.client == client; });
  if (gone == members_.end()) return;
  leased_ -= gone->leased;
  members_.erase(gone);
  std::erase_if(untold_, [client](const LeaseEvent& event) { return event.client == client; });
  changed_ = true;
}

void LeaseAccount::set_terms(const std::string& job, Terms terms) {
  terms_[job] = terms;
  changed_ = true;
}

void LeaseAccount::set_budget(Bytes budget) {
  budget_ = budget;
  changed_ = true;
}

void LeaseAccount::withhold(Bytes bytes) {
  const Bytes withheld = std::min(bytes, saturating_sub(budget_, leased_));
  changed_ = changed_ || withheld != withheld_;
  withheld_ = withheld;
}

void LeaseAccount::take_back(Member& member, Bytes bytes) {
  member.leased -= bytes;
  leased_ -= bytes;
  changed_ = true;
}

void LeaseAccount::grant(Member& member, Bytes bytes) {
  member.leased += bytes;
  leased_ += bytes;
  member.waiting = saturating_sub(member.waiting, bytes);
}

Bytes LeaseAccount::request(ClientId client, Bytes wanted, Unmet unmet, Time now) {
  Member& asking = member(client);
  if (unmet == Unmet::kKeep && wanted == 0_B) {  // withdrawn
    asking.keeps = asking.told_coming = false;
    asking.waiting = 0_B;
    changed_ = true;
    return 0_B;
  }
  const Bytes kept = unmet == Unmet::kKeep ? 0_B : asking.waiting;
  if (all_is_well(wanted)) {
    asking.keeps = asking.keeps || unmet == Unmet::kKeep;
    asking.waiting = 0_B;
    grant(asking, wanted);
    return wanted;
  }
  const Bytes before = asking.leased;
  const auto told = static_cast<std::ptrdiff_t>(untold_.size());
  asking.waiting = std::min(std::max(kept, wanted), kMostWaiting);
  distribute();
  // Others who wait are told later; this one by the answer.
  untold_.erase(std::remove_if(untold_.begin() + told, untold_.end(),
                               [client](const LeaseEvent& event) { return event.client == client; }),
                untold_.end());
  const Bytes got = asking.leased - before;
  const Bytes granted = std::min(got, wanted);
  if (got > granted) untold_.push_back({LeaseEvent::What::kGrant, client, tier_, got - granted});
  if (unmet == Unmet::kKeep) {
    asking.keeps = true;
  } else {
    asking.waiting = std::min(kept, asking.waiting);
  }
  if (asking.waiting > 0_B) ask_for_room(now, untold_);  // so that the answer can say whether more is coming
  asking.told_coming = asking.waiting > 0_B && coming();
  changed_ = true;
  return granted;
}

Bytes LeaseAccount::release(ClientId client, Bytes bytes) {
  Member& giving = member(client);
  const Bytes taken = std::min(bytes, giving.leased);
  take_back(giving, taken);
  return taken;
}

Bytes LeaseAccount::answer(ClientId client, std::uint64_t ask, Bytes released, Time now) {
  Member& giving = member(client);
  const Bytes taken = std::min(released, giving.leased);
  take_back(giving, taken);
  giving.deaf = false;
  if (giving.keeps) giving.waiting = std::min(giving.waiting + taken, kMostWaiting);
  if (giving.ask && giving.ask->number == ask) {
    if (giving.leased > giving.ask->target) giving.declined_until = now + manners_.retry_after;
    giving.ask.reset();
  }
  return taken;
}

Bytes LeaseAccount::demand_of(const Member& member, const Terms& terms) const {
  const Bytes wanted = member.leased + member.waiting;
  return member.deaf ? std::max(member.leased, std::min(wanted, terms.guarantee)) : wanted;
}

std::vector<LeaseAccount::Job> LeaseAccount::jobs() const {
  std::map<std::string, Job> by_name;
  for (std::size_t i = 0; i < members_.size(); ++i) {
    const Member& member = members_[i];
    Job& job = by_name[member.job];
    if (job.members.empty()) job.terms = terms_of(member.job);
    job.members.push_back(i);
    job.leased += member.leased;
    job.demand += demand_of(member, job.terms);
    if (fixed(member)) job.fixed += member.leased;
  }
  std::vector<Job> jobs;
  for (auto& [name, job] : by_name) jobs.push_back(std::move(job));
  return jobs;
}

// What each member would hold if everybody answered at once. A guarantee is set aside also where its job does
// not ask for it yet.
LeaseAccount::Amounts LeaseAccount::targets(const std::vector<Job>& jobs) const {
  std::vector<Claim> claims;
  for (const Job& job : jobs) {
    claims.push_back({.demand = std::max(job.demand, job.terms.guarantee),
                      .floor = std::max(job.terms.guarantee, job.fixed),
                      .weight = job.terms.weight});
  }
  const std::vector<Bytes> shares = fair_shares(usable(), claims);
  Amounts targets(members_.size());
  for (std::size_t j = 0; j < jobs.size(); ++j) {
    std::vector<Claim> within;
    for (const std::size_t i : jobs[j].members) {
      within.push_back({.demand = demand_of(members_[i], jobs[j].terms),
                        .floor = fixed(members_[i]) ? members_[i].leased : 0_B,
                        .weight = 1});
    }
    const std::vector<Bytes> of_members = fair_shares(shares[j], within);
    for (std::size_t k = 0; k < of_members.size(); ++k) targets[jobs[j].members[k]] = of_members[k];
  }
  return targets;
}

// What each member gets now of what is free, on its way to its target: first what guarantees lack.
LeaseAccount::Amounts LeaseAccount::divide_free(const std::vector<Job>& jobs, const Amounts& targets) const {
  std::vector<Claim> claims(members_.size());
  for (const Job& job : jobs) {
    Bytes unmet = saturating_sub(job.terms.guarantee, job.leased);
    for (const std::size_t i : job.members) {
      Claim& claim = claims[i];
      claim.demand = saturating_sub(targets[i], members_[i].leased);
      claim.floor = std::min(unmet, claim.demand);
      claim.weight = job.terms.weight;
      unmet -= claim.floor;
    }
    claims.push_back({.demand = unmet, .floor = unmet, .weight = 1});  // set aside
  }
  Amounts parts = fair_shares(saturating_sub(usable(), leased_), claims);
  parts.resize(members_.size());
  return parts;
}

// Nobody waits, nobody is owed anything, and there is enough.
bool LeaseAccount::all_is_well(Bytes wanted) const {
  if (wanted > saturating_sub(usable(), leased_)) return false;
  return std::all_of(members_.begin(), members_.end(), [this](const Member& member) {
    return member.waiting == 0_B && !member.deaf && terms_of(member.job).guarantee == 0_B;
  });
}

void LeaseAccount::distribute() {
  const std::vector<Job> by_job = jobs();
  const Amounts parts = divide_free(by_job, targets(by_job));
  for (std::size_t i = 0; i < members_.size(); ++i) {
    const Bytes part = std::min(parts[i], members_[i].waiting);
    if (part == 0_B) continue;
    grant(members_[i], part);
    untold_.push_back({LeaseEvent::What::kGrant, members_[i].client, tier_, part});
  }
}

// Who holds more than its share is asked for what the others still lack and for what is set aside, each by
// how much it has too much.
void LeaseAccount::ask_for_room(Time now, std::vector<LeaseEvent>& events) {
  const std::vector<Job> by_job = jobs();
  const Amounts aims = targets(by_job);
  Bytes lacking = saturating_sub(leased_, budget_), excess;
  for (const Job& job : by_job) lacking += saturating_sub(job.terms.guarantee, job.demand);
  for (std::size_t i = 0; i < members_.size(); ++i) {
    const Member& member = members_[i];
    lacking += saturating_sub(aims[i], member.leased);
    if (!fixed(member) && !member.ask) excess += saturating_sub(member.leased, aims[i]);
  }
  Bytes promised;
  for (const Member& member : members_) {
    if (member.ask) promised += saturating_sub(member.leased, member.ask->target);
  }
  const Bytes free = saturating_sub(usable(), leased_);
  const Bytes needed = std::min(saturating_sub(lacking, free + promised), excess);
  if (needed == 0_B) return;
  for (std::size_t i = 0; i < members_.size(); ++i) {
    Member& member = members_[i];
    const Bytes over = saturating_sub(member.leased, aims[i]);
    if (over == 0_B || fixed(member) || member.ask) continue;
    const Wide product = Wide{over.count()} * needed.count();
    const auto less = static_cast<std::uint64_t>((product + excess.count() - 1) / excess.count());
    const Bytes target = member.leased - Bytes(less);
    member.ask = Ask{++asks_, target, now + manners_.patience};
    events.push_back({LeaseEvent::What::kShrink, member.client, tier_, target, asks_});
  }
}

void LeaseAccount::pass_time(Time now, std::vector<LeaseEvent>& events) {
  for (Member& member : members_) {
    if (member.declined_until && *member.declined_until <= now) {
      member.declined_until.reset();
      changed_ = true;
    }
    if (!member.ask || member.ask->until > now) continue;
    member.ask.reset();
    member.deaf = true;
    changed_ = true;
    events.push_back({LeaseEvent::What::kDeaf, member.client, tier_, member.leased});
  }
}

// Who waits for what others were asked for is told when nothing is coming any more.
void LeaseAccount::tell(std::vector<LeaseEvent>& events) {
  const bool more = coming();
  for (LeaseEvent& event : untold_) {
    event.coming = event.what == LeaseEvent::What::kGrant && more && waiting(event.client) > 0_B;
    events.push_back(event);
  }
  for (Member& member : members_) {
    const bool waits = member.waiting > 0_B && more;
    const bool told = std::any_of(untold_.begin(), untold_.end(), [&](const LeaseEvent& event) {
      return event.client == member.client && event.what == LeaseEvent::What::kGrant;
    });
    if (member.told_coming && !waits && !told)
      events.push_back({LeaseEvent::What::kGrant, member.client, tier_, 0_B});
    member.told_coming = waits;
  }
  untold_.clear();
}

void LeaseAccount::find_due() {
  due_.reset();
  for (const Member& member : members_) {
    if (member.ask && (!due_ || member.ask->until < *due_)) due_ = member.ask->until;
    if (member.declined_until && (!due_ || *member.declined_until < *due_)) due_ = *member.declined_until;
  }
}

void LeaseAccount::settle(Time now, std::vector<LeaseEvent>& events) {
  if (!changed_ && (!due_ || *due_ > now)) return;
  pass_time(now, events);
  const bool wanting = std::any_of(members_.begin(), members_.end(),
                                   [](const Member& member) { return member.waiting > 0_B; });
  if (wanting) distribute();
  if (wanting || leased_ > budget_) ask_for_room(now, untold_);
  tell(events);
  find_due();
  changed_ = false;
}

Bytes LeaseAccount::leased(ClientId client) const {
  const Member* known = find(client);
  return known == nullptr ? Bytes() : known->leased;
}
Bytes LeaseAccount::waiting(ClientId client) const {
  const Member* known = find(client);
  return known == nullptr ? Bytes() : known->waiting;
}
bool LeaseAccount::deaf(ClientId client) const {
  const Member* known = find(client);
  return known != nullptr && known->deaf;
}
bool LeaseAccount::coming() const {
  return std::any_of(members_.begin(), members_.end(),
                     [](const Member& member) { return member.ask.has_value(); });
}

}  // namespace terrace
