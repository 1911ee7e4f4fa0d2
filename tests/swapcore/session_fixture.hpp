// A session of an emulated device, with one site a layer, for tests of what it does in a step.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "swapcore/session.hpp"

namespace terrace {

class OneSiteALayer : public testing::Test {
 protected:
  OneSiteALayer(int layers, const EmulatedOptions& device)
      : layers_(layers),
        device_(std::move(open_emulated_device(device)).value()),
        compute_(*device_->create_stream(StreamPriority::kNormal)) {}
  ~OneSiteALayer() override {
    session_.reset();
    device_->destroy_stream(compute_);
    EXPECT_EQ(device_->memory()->free, device_->memory()->total);
  }

  // By policy_ as it is now.
  void open() {
    auto session = Session::open(*device_, {.policy = policy_, .join_daemon = false, .compute = compute_});
    ASSERT_TRUE(session) << session.error().text;
    session_ = std::move(session).value();
    for (int l = 0; l < layers_; ++l)
      sites_.push_back(session_->declare({"layer." + std::to_string(l) + ".fc", SiteKind::kMatmul, l, "fc"}));
  }
  [[nodiscard]] SiteId site(int layer) const { return sites_[static_cast<std::size_t>(layer)]; }

  const int layers_;
  std::unique_ptr<Device> device_;
  Stream compute_;
  Policy policy_;
  std::unique_ptr<Session> session_;
  std::vector<SiteId> sites_;
};

}  // namespace terrace
