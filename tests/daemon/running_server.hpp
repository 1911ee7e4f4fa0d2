// A server in this process, on a socket of its own, for tests that talk to it as clients do.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>
#include <thread>

#include "daemon/server.hpp"
#include "runtime/daemon_link.hpp"
#include "runtime/link_time.hpp"
#include "runtime/shared_page.hpp"

namespace terrace::test {

class RunningServer {
 public:
  struct Limits {
    Bytes hbm;
    Bytes ddr;
    std::string listen = {};  // empty: no HTTP
    LeaseAccount::Manners manners = {};
    std::function<Result<Server::Live>()> reread = {};
    AccessRules access = {};
    DriverMemory driver_memory = {};
    std::vector<JobRule> jobs = {};
  };
  RunningServer(const std::string& socket, const Limits& limits) {
    Server::Options options;
    options.socket = socket;
    options.listen = limits.listen;
    options.registry.hbm_per_device = limits.hbm;
    options.registry.node_budgets[static_cast<std::size_t>(TierId::kDdr)] = limits.ddr;
    options.registry.manners = limits.manners;
    options.registry.driver_memory = limits.driver_memory;
    options.registry.jobs = limits.jobs;
    options.reread = limits.reread;
    options.access = limits.access;
    auto opened = Server::open(options);
    EXPECT_TRUE(opened.ok()) << (opened ? "" : opened.error().text);
    if (!opened) return;
    server_ = std::move(*opened);
    thread_ = std::thread([this] { EXPECT_TRUE(server_->run().ok()); });
  }
  ~RunningServer() { stop(); }
  void stop() {
    if (!server_) return;
    server_->stop();
    thread_.join();
    server_.reset();
  }
  [[nodiscard]] Server& operator*() { return *server_; }
  [[nodiscard]] Server* operator->() { return server_.get(); }
  [[nodiscard]] Bytes leased(TierId tier) {
    return server_->registry().view().leased[static_cast<std::size_t>(tier)];
  }
  [[nodiscard]] std::size_t clients() { return server_->registry().view().live.size(); }

 private:
  std::unique_ptr<Server> server_;
  std::thread thread_;
};

// A client as a training process is one, but for the training.
class TestClient {
 public:
  using OnShrink = std::function<void(DaemonLink& link, const DaemonLink::Ask& ask)>;
  explicit TestClient(const std::string& socket, const std::string& job = "job", OnShrink on_shrink = {}) {
    auto page = SharedPage::create(job);
    EXPECT_TRUE(page.ok());
    page_ = std::move(*page);
    DaemonLink::Options options;
    options.socket = socket;
    options.job = job;
    options.device = "emulated:0";
    options.page_fd = page_->fd();
    options.link_time = &link_time_;
    options.patience = std::chrono::seconds(30);
    options.say = [](std::string_view) {};
    if (on_shrink) {
      options.on_shrink = [this, on_shrink](const DaemonLink::Ask& ask) { on_shrink(*link_, ask); };
    }
    auto link = DaemonLink::start(options);
    EXPECT_TRUE(link.ok());
    link_ = std::move(*link);
  }
  [[nodiscard]] DaemonLink& link() { return *link_; }
  [[nodiscard]] MetricsPage& page() { return page_->metrics(); }
  [[nodiscard]] LinkTime& link_time() { return link_time_; }
  // What was granted; zero where the link had no answer.
  [[nodiscard]] Bytes ask(TierId tier, Bytes bytes) {
    const auto granted = link_->request(tier, bytes);
    return granted ? *granted : Bytes();
  }

 private:
  std::unique_ptr<SharedPage> page_;
  LinkTime link_time_;
  std::unique_ptr<DaemonLink> link_;
};

}  // namespace terrace::test
