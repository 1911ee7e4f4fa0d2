#include "daemon/http_auth.hpp"

#include <crypt.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <atomic>
#include <thread>

#include "tests/daemon/process.hpp"

namespace terrace {
namespace {

using test::TemporaryFolder;
using testing::HasSubstr;
using testing::Not;

// Cheap ones: a test has no secrets.
std::string hash_of(const std::string& password, const char* setting) {
  crypt_data work{};
  return ::crypt_r(password.c_str(), setting, &work);
}
constexpr const char* kBcrypt = "$2b$04$abcdefghijklmnopqrstuu";
constexpr const char* kSha512 = "$6$rounds=1000$salt$";

class HttpAuthTest : public testing::Test {
 protected:
  std::string file(const std::string& text, mode_t mode = 0640) {
    const std::string path = folder_.write("readers", text);
    ::chmod(path.c_str(), mode);
    return path;
  }
  TemporaryFolder folder_;
};

TEST(Base64, IsDecoded) {
  EXPECT_EQ(decode_base64("dXNlcjpwYXNz"), "user:pass");
  EXPECT_EQ(decode_base64("YQ=="), "a");
  EXPECT_EQ(decode_base64("YWI="), "ab");
  EXPECT_EQ(decode_base64("YWI"), "ab");
  EXPECT_EQ(decode_base64(""), "");
  EXPECT_EQ(decode_base64("!!!!"), "");
}

TEST_F(HttpAuthTest, WhoKnowsAPasswordMayRead) {
  auto auth = HttpAuth::load(file("# readers\nann:" + hash_of("s3cret", kBcrypt) +
                                  "\r\n\nbob:" + hash_of("other:with colon", kSha512) + "\n"));
  ASSERT_TRUE(auth.ok()) << auth.error().text;
  EXPECT_EQ(auth->check("Basic YW5uOnMzY3JldA=="), HttpAuth::Answer::kAllowed);
  EXPECT_EQ(auth->check("Basic YW5uOnMzY3JldA=="), HttpAuth::Answer::kAllowed) << "as remembered";
  EXPECT_EQ(auth->check("Basic Ym9iOm90aGVyOndpdGggY29sb24="), HttpAuth::Answer::kAllowed);
  EXPECT_EQ(auth->check(nullptr), HttpAuth::Answer::kDenied);
  EXPECT_EQ(auth->check("Bearer YW5uOnMzY3JldA=="), HttpAuth::Answer::kDenied);
  EXPECT_EQ(auth->check("Basic YW5uOndyb25n"), HttpAuth::Answer::kDenied);
  EXPECT_EQ(auth->check("Basic Ym9iOnMzY3JldA=="), HttpAuth::Answer::kDenied) << "another's password";
  EXPECT_EQ(auth->check(("Basic " + std::string(5000, 'A')).c_str()), HttpAuth::Answer::kDenied);
}

TEST_F(HttpAuthTest, WhoGuessesIsSlowedDownAndOthersAreNot) {
  auto auth = HttpAuth::load(file("ann:" + hash_of("s3cret", kBcrypt) + "\n"));
  ASSERT_TRUE(auth.ok());
  EXPECT_EQ(auth->check("Basic YW5uOnMzY3JldA=="), HttpAuth::Answer::kAllowed);
  bool limited = false;
  for (int i = 0; i < 100 && !limited; ++i)
    limited = auth->check("Basic YW5uOndyb25n") == HttpAuth::Answer::kTooMany;
  EXPECT_TRUE(limited);
  EXPECT_EQ(auth->check("Basic YW5uOnMzY3JldA=="), HttpAuth::Answer::kAllowed);
}

TEST_F(HttpAuthTest, WhoIsKnownDoesNotWaitForTheGuessesOfOthers) {
  auto auth = HttpAuth::load(file("ann:" + hash_of("s3cret", "$2b$11$abcdefghijklmnopqrstuu") + "\n"));
  ASSERT_TRUE(auth.ok());
  EXPECT_EQ(auth->check("Basic YW5uOnMzY3JldA=="), HttpAuth::Answer::kAllowed);
  std::atomic<bool> guessing{true};
  std::thread guess([&] {
    EXPECT_EQ(auth->check("Basic YW5uOndyb25n"), HttpAuth::Answer::kDenied);
    guessing = false;
  });
  unsigned served = 0;
  for (; guessing; ++served) EXPECT_EQ(auth->check("Basic YW5uOnMzY3JldA=="), HttpAuth::Answer::kAllowed);
  guess.join();
  EXPECT_GT(served, 20000U) << "a hash takes as long as very many of these";
}

TEST_F(HttpAuthTest, ABadFileIsRefusedAndItsSecretsAreNotSaid) {
  const std::string good = "ann:" + hash_of("s3cret", kBcrypt) + "\n";
  const auto refusal = [&](const std::string& text, mode_t mode = 0640) {
    const auto auth = HttpAuth::load(file(text, mode));
    return auth.ok() ? std::string("accepted") : auth.error().text;
  };
  EXPECT_THAT(refusal(good + "bob:plainpassword\n"),
              HasSubstr("readers:2: not a hash that is hard to guess"));
  EXPECT_THAT(refusal(good + "bob:plainpassword\n"), Not(HasSubstr("plainpassword")));
  EXPECT_THAT(refusal("bob:$apr1$x$y\n"), HasSubstr("htpasswd -nB"));
  EXPECT_THAT(refusal("bob\n"), HasSubstr("readers:1: a line is USER:HASH"));
  EXPECT_THAT(refusal("# nobody\n"), HasSubstr("names nobody"));
  EXPECT_THAT(refusal(good, 0644), HasSubstr("chmod 640"));
  EXPECT_EQ(HttpAuth::load(folder_.file("absent")).error().code, Errc::kIo);
}

}  // namespace
}  // namespace terrace
