// Labels of the metrics are spelled as the layers that own the enums spell them.
#include <gtest/gtest.h>

#include "runtime/copy_engine.hpp"
#include "runtime/device.hpp"
#include "runtime/metrics.hpp"

namespace terrace {
namespace {

TEST(LabelNames, AreThoseOfDirectionAndCopyReason) {
  const MetricInfo& info = info_of(Metric::kTransferBytes);
  for (int direction = 0; direction < kDirectionCount; ++direction) {
    EXPECT_STREQ(info.labels[0].value(static_cast<std::size_t>(direction)),
                 name_of(static_cast<Direction>(direction)));
  }
  for (int reason = 0; reason < kCopyReasonCount; ++reason) {
    EXPECT_STREQ(info.labels[1].value(static_cast<std::size_t>(reason)),
                 name_of(static_cast<CopyReason>(reason)));
  }
}

}  // namespace
}  // namespace terrace
