#include "runtime/result.hpp"

#include <gtest/gtest.h>

#include <memory>
#include <set>
#include <string>

namespace terrace {
namespace {

Result<int> half(int n) {
  if (n % 2 != 0) return Error{Errc::kInvalidArgument, "odd"};
  return n / 2;
}

TEST(Result, HoldsAValueOrAnError) {
  ASSERT_TRUE(half(4).ok());
  EXPECT_EQ(*half(4), 2);
  ASSERT_FALSE(half(3).ok());
  EXPECT_EQ(half(3).error().code, Errc::kInvalidArgument);
}

TEST(Result, MovesWhatCannotBeCopied) {
  Result<std::unique_ptr<int>> result(std::make_unique<int>(7));
  const std::unique_ptr<int> taken = std::move(result).value();
  EXPECT_EQ(*taken, 7);
}

TEST(Result, StatusIsOkUntilGivenAnError) {
  EXPECT_TRUE(Status().ok());
  const Status failed = out_of_budget(3_MiB, Pool::kExpert, "hbm budget");
  ASSERT_FALSE(failed.ok());
  EXPECT_EQ(failed.error().code, Errc::kOutOfBudget);
  EXPECT_EQ(failed.error().bytes, 3_MiB);
  EXPECT_EQ(failed.error().pool, Pool::kExpert);
}

TEST(Result, EveryCodeHasItsOwnName) {
  std::set<std::string> names;
  constexpr int kCodes = static_cast<int>(Errc::kCancelled) + 1;
  for (int code = 0; code < kCodes; ++code) names.insert(name_of(static_cast<Errc>(code)));
  EXPECT_EQ(names.size(), static_cast<std::size_t>(kCodes));
}

TEST(ResultDeathTest, ReadingTheWrongSideIsAProgrammerError) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_DEATH((void)half(3).value(), "Result holds an error");
  EXPECT_DEATH((void)half(4).error(), "Result holds a value");
  EXPECT_DEATH((void)Status().error(), "Status is ok");
}

}  // namespace
}  // namespace terrace
