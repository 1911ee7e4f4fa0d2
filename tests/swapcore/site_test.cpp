#include "swapcore/site.hpp"

#include <gtest/gtest.h>

#include <set>
#include <string>

namespace terrace {
namespace {

TEST(Site, EveryKindHasTheNameThatPoliciesUse) {
  std::set<std::string> names;
  for (int i = 0; i < kSiteKindCount; ++i) names.insert(name_of(static_cast<SiteKind>(i)));
  EXPECT_EQ(names, (std::set<std::string>{"matmul", "gmm", "attention", "scan"}));
}

}  // namespace
}  // namespace terrace
