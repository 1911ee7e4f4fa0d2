// A client's metrics page, header and slots, its Hello, and the board of its device's link: whatever they
// hold, the daemon's status stays valid JSON of bounded length, no link is leased twice, and a page that is
// not one is refused.
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <nlohmann/json.hpp>

#include "daemon/client_registry.hpp"
#include "daemon/status_json.hpp"
#include "runtime/link_time.hpp"
#include "tests/fuzz/target.hpp"

using namespace terrace;

namespace {

constexpr std::size_t kSlotsOffset = 128;  // of the page: behind its header

// The input writes the header, or the slots of a page with a right header: its first byte says which.
void write_input(int page, std::span<const std::uint8_t> input) {
  const off_t at = input[0] % 4 == 0 ? 0 : static_cast<off_t>(kSlotsOffset);
  const std::span<const std::uint8_t> bytes = input.subspan(1);
  // A sealed page does not grow, so a write beyond its end falls short; what fits is there.
  if (::pwrite(page, bytes.data(), bytes.size(), at) < 0) return;
}

Hello hello_from(std::span<const std::uint8_t> input) {
  Hello hello;
  std::memcpy(static_cast<void*>(&hello), input.data(), std::min(input.size(), sizeof hello));
  hello.role = Role::kClient;
  return hello;
}

// The input writes the board that two clients of one device share, its header too where its first byte says
// so. Neither the daemon nor the other client believes it beyond what makes sense.
void check_link(ClientRegistry& registry, const LinkLeases::Seat& seat, std::span<const std::uint8_t> input) {
  const off_t at = input[0] % 8 == 1 ? 0 : 64;
  if (::pwrite(seat.fd, input.data(), input.size(), at) < 0) return;
  const Nanoseconds now = steady_clock().now();
  for (int look = 1; look <= 3; ++look) registry.look(now + look * LinkLeases::kLook);
  LinkAmounts leased{};
  for (const auto& record : registry.view(ClientRegistry::Ended::kLeftOut).live) {
    for (std::size_t d = 0; d < kLinkDirections; ++d) leased[d] += record.link[d];
  }
  for (const std::uint32_t sum : leased) HOLDS(sum <= kLinkWhole);
  auto board = LinkBoard::open(OwnedFd(::dup(seat.fd)));
  if (!board) {
    HOLDS(board.error().code == Errc::kProtocol);
    return;
  }
  LinkTime link;
  link.take_seat(*std::move(board), seat.slot);
  LinkView view(link, input[0] % kLinkDirections);
  const double usable = view.usable(now);
  HOLDS(usable >= LinkView::kLeast && usable <= 1);
  (void)view.collective_runs(now);
  HOLDS(!view.collective_runs(now + LinkView::kLongestCollective));
}

void check_status(const ClientRegistry::View& view, std::uint64_t run) {
  const std::string text = status_json({.pid = 1, .version = "0", .socket = "/s", .listen = ""}, view, run);
  HOLDS(text.size() <= kMaxWireText);
  HOLDS(nlohmann::json::accept(text));
}

}  // namespace

int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size == 0) return 0;
  const std::span input(data, size);
  auto page = SharedPage::create("fuzz");
  HOLDS(page.ok());
  write_input((*page)->fd(), input);
  auto reader = SharedPageReader::open(::dup((*page)->fd()));
  if (!reader) {
    HOLDS(reader.error().code == Errc::kProtocol);
    return 0;
  }
  ClientRegistry::Options options;
  options.node_budgets[static_cast<std::size_t>(TierId::kDdr)] = 1_GiB;
  ClientRegistry registry(options);
  const Hello hello = hello_from(input.last(std::min(size, sizeof(Hello))));
  const ClientRegistry::Process process{.pid = 1, .uid = 1, .user = "user"};
  const auto joined = registry.join(hello, process, std::move(*reader));
  if (!joined) return 0;
  const LeaseRequest request{.tier = static_cast<std::uint32_t>(TierId::kDdr), .wanted = hello.capacity};
  const auto grant = registry.request(joined->client, request, LeaseBook::Time(0));
  HOLDS(grant.leased <= 1_GiB);
  auto second = SharedPage::create("second");
  HOLDS(second.ok());
  auto second_reader = SharedPageReader::open(::dup((*second)->fd()));
  const auto neighbour = registry.join(hello, process, std::move(*second_reader));
  HOLDS(neighbour.ok() && joined->link_seat.has_value());
  check_link(registry, *joined->link_seat, input);
  check_status(registry.view(), 0);
  registry.leave(joined->client);
  check_status(registry.view(), hello.run);
  return 0;
}
