// What leaves in a bug report: no secret, no name.
#include "daemon/support/scrub.hpp"

#include <gtest/gtest.h>

namespace terrace {
namespace {

const std::string kHomes = std::string("/") + "home/";
const Identity kAnna{.user = "anna", .home = kHomes + "anna", .host = "node17"};

std::string scrub(const std::string& text) { return scrubbed(text, kAnna); }

TEST(Scrub, ValuesOfSecretsGoInEveryFormTheyAreGivenIn) {
  EXPECT_EQ(scrub("token = abc123"), "token = [removed]");
  EXPECT_EQ(scrub("password: \"a b\\\" c\", next"), "password: \"[removed]\", next");
  EXPECT_EQ(scrub("{\"api_key\":\"k\",\"x\":1}"), "{\"api_key\":\"[removed]\",\"x\":1}");
  EXPECT_EQ(scrub("run --token s3cret --steps 3"), "run --token [removed] --steps 3");
  EXPECT_EQ(scrub("AWS_SECRET_ACCESS_KEY=x/y+z train"), "AWS_SECRET_ACCESS_KEY=[removed] train");
  EXPECT_EQ(scrub("Authorization: Basic dXNlcjpw\nnext"), "Authorization: [removed]\nnext");
  EXPECT_EQ(scrub("curl https://anna:pw@host/x"), "curl https://[removed]@host/x");
  EXPECT_EQ(scrub("key = 5, monkey = 6"), "key = [removed], monkey = 6");
  EXPECT_EQ(scrub("secret='unclosed\nnext"), "secret='[removed]'\nnext");
}

TEST(Scrub, TextAboutSecretsStays) {
  for (const char* text :
       {"the key of the section", "no token was given", "--token", "keyboard: us", "", "://"}) {
    EXPECT_EQ(scrub(text), text);
  }
}

TEST(Scrub, PeopleAndMachinesHaveNoNames) {
  EXPECT_EQ(scrub(kHomes + "anna/run.log"), "~/run.log");
  EXPECT_EQ(scrub("data in " + kHomes + "bert/x, by anna on node17"),
            "data in " + kHomes + "USER/x, by USER on HOST");
  EXPECT_EQ(scrub("savanna node170"), "savanna node170");
  EXPECT_EQ(scrubbed("root of anna", Identity{.user = "root", .home = "/", .host = ""}), "root of anna");
}

TEST(Scrub, LineBreaksAndOtherBytesStay) {
  const std::string text = "a\n\nb\t\xff\0c" + std::string(3, '\0') + "\n";
  EXPECT_EQ(scrub(text), text);
}

}  // namespace
}  // namespace terrace
