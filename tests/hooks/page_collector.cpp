#include "tests/hooks/page_collector.hpp"

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <utility>

namespace terrace::test {

PageCollector::PageCollector(Bytes hbm_budget, AskBack ask) : hbm_budget_(hbm_budget), ask_(ask) {
  std::string pattern = (std::filesystem::temp_directory_path() / "terrace-hooks-XXXXXX").string();
  if (mkdtemp(pattern.data()) == nullptr) throw std::runtime_error("no temporary folder");
  folder_ = pattern;
  path_ = folder_ + "/s";
  listener_ = OwnedFd(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  wake_ = OwnedFd(::eventfd(0, EFD_CLOEXEC));
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::strncpy(address.sun_path, path_.c_str(), sizeof address.sun_path - 1);
  if (::bind(listener_.get(), reinterpret_cast<sockaddr*>(&address), sizeof address) != 0 ||
      ::listen(listener_.get(), 16) != 0)
    throw std::runtime_error("no socket at " + path_);
  thread_ = std::thread([this] { serve(); });
}

PageCollector::~PageCollector() {
  if (thread_.joinable()) collect();
  std::error_code ignored;
  std::filesystem::remove_all(folder_, ignored);
}

std::vector<std::unique_ptr<SharedPageReader>> PageCollector::collect() {
  const std::uint64_t one = 1;
  EXPECT_EQ(::write(wake_.get(), &one, sizeof one), static_cast<ssize_t>(sizeof one));
  thread_.join();
  return std::move(pages_);
}

void PageCollector::serve() {
  for (;;) {
    std::vector<pollfd> watched = {{listener_.get(), POLLIN, 0}, {wake_.get(), POLLIN, 0}};
    for (const WireConnection& each : connections_) watched.push_back({each.fd(), POLLIN, 0});
    if (::poll(watched.data(), watched.size(), -1) < 0) continue;
    for (std::size_t i = 2; i < watched.size(); ++i) {
      if (watched[i].revents != 0) answer(connections_[i - 2]);
    }
    // A guest that waits at the door comes in before the end.
    for (int fd = -1; (fd = ::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK)) >= 0;)
      welcome(OwnedFd(fd));
    if ((watched[1].revents & POLLIN) != 0) return;
  }
}

void PageCollector::answer(WireConnection& connection) {
  auto asked = connection.receive(std::chrono::milliseconds(0));
  if (!asked) return connection.close();  // poll() passes over it from now on
  if (const auto* request = std::get_if<LeaseRequest>(&asked->message)) {
    const bool hbm = request->tier == static_cast<std::uint32_t>(TierId::kHbm);
    Bytes& leased = hbm ? leased_ : ddr_leased_;
    Bytes& budget = hbm ? hbm_budget_ : ask_.ddr;
    const Bytes granted = std::min(Bytes(request->wanted), budget - leased);
    leased += granted;
    const bool coming =
        request->unmet == Unmet::kKeep && Bytes(request->wanted) > granted && ask_.others_give > 0_B;
    leased_peak_ = std::max(leased_peak_, leased_);
    (void)connection.send(LeaseGrant{request->tier, coming ? 1U : 0U, granted.count(), leased.count()},
                          asked->sequence);
    if (coming) {
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      const Bytes given = std::exchange(ask_.others_give, 0_B);
      budget += given;
      leased += given;
      (void)connection.send(LeaseGrant{request->tier, 0, given.count(), leased.count()}, 0);
    }
    if (leased_ < ask_.leased) return;
    ask_.leased = kNever;
    hbm_budget_ = ask_.target;
    (void)connection.send(ShrinkRequest{request->tier, 5000, 1, ask_.target.count()}, 0);
  } else if (const auto* reply = std::get_if<ShrinkReply>(&asked->message)) {
    leased_ -= Bytes(reply->released);
    answered_ += Bytes(reply->released);
    (void)connection.send(LeaseGrant{reply->tier, 0, 0, leased_.count()}, asked->sequence);
  } else if (const auto* release = std::get_if<Release>(&asked->message)) {
    const bool hbm = release->tier == static_cast<std::uint32_t>(TierId::kHbm);
    Bytes& leased = hbm ? leased_ : ddr_leased_;
    leased -= Bytes(release->bytes);
    if (hbm) released_ += Bytes(release->bytes);
    (void)connection.send(LeaseGrant{release->tier, 0, 0, leased.count()}, asked->sequence);
  }
}

void PageCollector::welcome(OwnedFd accepted) {
  WireConnection connection(std::move(accepted));
  auto hello = connection.receive(std::chrono::seconds(5));
  if (!hello || !std::holds_alternative<Hello>(hello->message)) return;
  auto page = SharedPageReader::open(hello->fd.release());
  devices_.emplace_back(std::get<Hello>(hello->message).device.view());
  if (page) pages_.push_back(*std::move(page));
  if (connection.send(Welcome{.client = pages_.size(), .daemon_pid = ::getpid()}, hello->sequence))
    connections_.push_back(std::move(connection));
}

}  // namespace terrace::test
