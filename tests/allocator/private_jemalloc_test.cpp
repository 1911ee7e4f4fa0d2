// jemalloc stays private: nobody else sees it, the process's malloc stays what it was, and a library that
// carries it may be opened late. cmake/jemalloc.sh says how it is built.
#include <elf.h>
#include <gtest/gtest.h>
#include <sys/wait.h>

#include <array>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "tests/paths.hpp"

namespace terrace {
namespace {

struct Answer {
  int code = -1;
  std::string text;  // stdout and stderr
};

Answer run(const std::string& command) {
  Answer answer;
  FILE* pipe = popen((command + " 2>&1 </dev/null").c_str(), "r");
  if (pipe == nullptr) return answer;
  std::array<char, 4096> buffer{};
  for (std::size_t got = 0; (got = fread(buffer.data(), 1, buffer.size(), pipe)) > 0;) {
    answer.text.append(buffer.data(), got);
  }
  const int status = pclose(pipe);
  if (WIFEXITED(status)) answer.code = WEXITSTATUS(status);
  return answer;
}

std::string quoted(const std::filesystem::path& path) { return "'" + path.string() + "'"; }

bool exists_on_path(const char* program) { return run(std::string("command -v ") + program).code == 0; }

// What the dynamic linker sees of a shared library.
class SharedObject {
 public:
  explicit SharedObject(const std::filesystem::path& path) {
    std::ifstream file(path, std::ios::binary);
    bytes_.assign(std::istreambuf_iterator<char>(file), {});
  }
  [[nodiscard]] bool valid() const {
    return bytes_.size() > sizeof(Elf64_Ehdr) && std::memcmp(bytes_.data(), ELFMAG, SELFMAG) == 0;
  }
  // Names that it offers to others.
  [[nodiscard]] std::set<std::string> exports() const {
    std::set<std::string> names;
    for (const auto& section : sections(SHT_DYNSYM)) {
      const auto strings = at<Elf64_Shdr>(header().e_shoff + section.sh_link * sizeof(Elf64_Shdr));
      for (std::uint64_t i = 0; i < section.sh_size / sizeof(Elf64_Sym); ++i) {
        const auto symbol = at<Elf64_Sym>(section.sh_offset + i * sizeof(Elf64_Sym));
        if (symbol.st_shndx == SHN_UNDEF) continue;
        names.insert(bytes_.data() + strings.sh_offset + symbol.st_name);
      }
    }
    return names;
  }
  [[nodiscard]] bool has_flag(std::uint64_t tag, std::uint64_t flag) const {
    for (const auto& section : sections(SHT_DYNAMIC)) {
      for (std::uint64_t i = 0; i < section.sh_size / sizeof(Elf64_Dyn); ++i) {
        const auto entry = at<Elf64_Dyn>(section.sh_offset + i * sizeof(Elf64_Dyn));
        if (static_cast<std::uint64_t>(entry.d_tag) == tag && (entry.d_un.d_val & flag) != 0) return true;
      }
    }
    return false;
  }

 private:
  template <typename T>
  [[nodiscard]] T at(std::uint64_t offset) const {
    T value;
    std::memcpy(&value, bytes_.data() + offset, sizeof value);
    return value;
  }
  [[nodiscard]] Elf64_Ehdr header() const { return at<Elf64_Ehdr>(0); }
  [[nodiscard]] std::vector<Elf64_Shdr> sections(std::uint32_t type) const {
    std::vector<Elf64_Shdr> found;
    for (unsigned i = 0; i < header().e_shnum; ++i) {
      const auto section = at<Elf64_Shdr>(header().e_shoff + i * sizeof(Elf64_Shdr));
      if (section.sh_type == type) found.push_back(section);
    }
    return found;
  }

  std::string bytes_;
};

bool is_an_allocators(const std::string& name) {
  static const std::set<std::string> kOfLibc = {
      "malloc",         "free",          "calloc",        "realloc",     "reallocarray", "memalign",
      "aligned_alloc",  "valloc",        "pvalloc",       "cfree",       "mallopt",      "malloc_usable_size",
      "posix_memalign", "mallinfo",      "mallinfo2",     "malloc_trim", "malloc_stats", "malloc_info",
      "__libc_malloc",  "__malloc_hook", "pthread_create"};
  static const std::set<std::string> kOfJemalloc = {"mallocx",
                                                    "rallocx",
                                                    "xallocx",
                                                    "sallocx",
                                                    "dallocx",
                                                    "sdallocx",
                                                    "nallocx",
                                                    "mallctl",
                                                    "mallctlnametomib",
                                                    "mallctlbymib",
                                                    "malloc_stats_print",
                                                    "malloc_conf",
                                                    "malloc_message"};
  return kOfLibc.contains(name) || kOfJemalloc.contains(name) || name.starts_with("terrace_je_") ||
         name.starts_with("je_") || name.starts_with("_Znw") || name.starts_with("_Zna") ||
         name.starts_with("_Zdl") || name.starts_with("_Zda");
}

const std::filesystem::path& late_library() {
  static const std::filesystem::path kPath = test::shared_library("liblate_library.so");
  return kPath;
}

TEST(PrivateJemalloc, NoLibraryOfOursOffersAnAllocatorsNames) {
  for (const auto& path : {late_library(), test::shared_library("libterrace.so")}) {
    const SharedObject library(path);
    ASSERT_TRUE(library.valid()) << path;
    const auto names = library.exports();
    EXPECT_FALSE(names.empty());
    for (const std::string& name : names) EXPECT_FALSE(is_an_allocators(name)) << name << " in " << path;
  }
  EXPECT_TRUE(SharedObject(late_library()).exports().contains("late_allocate"));
}

TEST(PrivateJemalloc, ThreadLocalStorageIsOfTheKindThatMayComeLate) {
  for (const auto& path : {late_library(), test::shared_library("libterrace.so")}) {
    EXPECT_FALSE(SharedObject(path).has_flag(DT_FLAGS, DF_STATIC_TLS)) << path;
  }
}

// Threads that used it run its code once more as they end.
TEST(PrivateJemalloc, ALibraryThatCarriesItIsNeverUnloaded) {
  for (const auto& path : {late_library(), test::shared_library("libterrace.so")}) {
    EXPECT_TRUE(SharedObject(path).has_flag(DT_FLAGS_1, DF_1_NODELETE)) << path;
  }
}

TEST(PrivateJemalloc, TheArchiveDefinesOurNamesOnly) {
  if (!exists_on_path("nm") || !std::filesystem::exists(TERRACE_JEMALLOC_ARCHIVE)) {
    GTEST_SKIP() << "the archive or nm is not on this machine";
  }
  const Answer answer = run("nm --defined-only -g -f posix " + quoted(TERRACE_JEMALLOC_ARCHIVE));
  ASSERT_EQ(answer.code, 0) << answer.text;
  int names = 0;
  std::istringstream lines(answer.text);
  for (std::string line; std::getline(lines, line);) {
    if (line.empty() || line.ends_with(':')) continue;  // a member's name
    EXPECT_TRUE(line.starts_with("terrace_je_")) << line;
    ++names;
  }
  EXPECT_GT(names, 100);
}

TEST(PrivateJemalloc, OpenedLateByAProgramWhoseMallocStaysLibcs) {
  const Answer answer = run(quoted(test::program("late_host")) + " " + quoted(late_library()) + " libc.");
  EXPECT_EQ(answer.code, 0) << answer.text;
}

TEST(PrivateJemalloc, OpenedLateByAProgramThatRunsUnderAnotherJemalloc) {
  const Answer answer = run("LD_PRELOAD=libjemalloc.so.2 " + quoted(test::program("late_host")) + " " +
                            quoted(late_library()) + " libjemalloc.");
  if (answer.code == 77) GTEST_SKIP() << "there is no libjemalloc.so.2 here";
  EXPECT_EQ(answer.code, 0) << answer.text;
}

TEST(PrivateJemalloc, OpenedLateByPython) {
  if (!exists_on_path("python3")) GTEST_SKIP() << "there is no python3 here";
  const auto script = test::source_dir() / "tests/allocator/private_jemalloc_test.py";
  const Answer answer = run("python3 " + quoted(script) + " " + quoted(late_library()));
  EXPECT_EQ(answer.code, 0) << answer.text;
}

}  // namespace
}  // namespace terrace
