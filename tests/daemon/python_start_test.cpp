#include "daemon/python_start.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>

namespace terrace {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;
using testing::IsEmpty;

class PythonStart : public testing::Test {
 protected:
  void SetUp() override {
    root_ = fs::path(testing::TempDir()) / "terrace_python_start";
    fs::create_directories(root_ / "bin");
    fs::create_directories(root_ / "lib" / "terrace_python" / "start");
  }
  void TearDown() override { fs::remove_all(root_); }
  [[nodiscard]] std::string notice(const std::vector<std::string>& command) const {
    return isolated_python_notice(command, root_ / "bin");
  }
  fs::path root_;
};

TEST_F(PythonStart, TheFolderComesFirstAndTheRestStays) {
  const std::string start = (root_ / "lib" / "terrace_python" / "start").string();
  EXPECT_EQ(python_path(root_ / "bin", nullptr), start);
  EXPECT_EQ(python_path(root_ / "bin", ""), start);
  EXPECT_EQ(python_path(root_ / "bin", "a:b"), start + ":a:b");
  EXPECT_THAT(python_path(root_ / "elsewhere" / "bin", "a:b"), IsEmpty());
}

TEST_F(PythonStart, AnIsolatedInterpreterIsNamed) {
  for (const std::vector<std::string>& command :
       std::vector<std::vector<std::string>>{{"python", "-I", "t.py"},
                                             {"/usr/bin/python3.11", "-uE", "t.py"},
                                             {"python3", "-W", "ignore", "-S", "t.py"},
                                             {"python3", "-Xdev", "-I", "-c", "pass"}}) {
    EXPECT_THAT(notice(command), HasSubstr("import terrace.torch")) << command[1];
  }
}

TEST_F(PythonStart, OthersAreNot) {
  for (const std::vector<std::string>& command :
       std::vector<std::vector<std::string>>{{"python3", "t.py", "-I"},
                                             {"python3", "-m", "pkg", "-E"},
                                             {"python3", "-c", "pass", "-S"},
                                             {"python3", "-W", "-I", "t.py"},
                                             {"python3"},
                                             {"pythonista", "-I"},
                                             {"torchrun", "-I"}}) {
    EXPECT_THAT(notice(command), IsEmpty()) << command[0];
  }
}

}  // namespace
}  // namespace terrace
