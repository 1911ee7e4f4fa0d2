#!/usr/bin/env python3
"""Feeds tidy.py one bad sample for each rule and expects the breach; then a clean tree, and expects silence."""

import shutil
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import cpp_scan  # noqa: E402
import tidy  # noqa: E402

CLEAN = {
    "README.md": "# T\n\nSee [the docs](docs/README.md#what-is-here) and [a site](https://example.org/x).\n",
    "docs/README.md": "# Docs\n\n## What is here\n\n```\n[not a link](nowhere.md)\n```\n",
    "runtime/README.md": "# runtime\n",
    "runtime/clock.hpp": "#pragma once\n",
    "runtime/clock.cpp": '#include "runtime/clock.hpp"\n\n#include <chrono>\n',
    "runtime/cuda/cuda_clock.cpp": '#include <cuda.h>\n#include "runtime/clock.hpp"\n',
    "examples/README.md": "# examples\n",
    "examples/c_api/main.c": '#include "hooks/c_abi/terrace.h"\n',
    "tests/README.md": "# tests\n",
    "tests/runtime/clock_test.cpp": '#include "runtime/clock.hpp"\n#include "tests/paths.hpp"\n',
    "tests/trainer/loss_test.cpp": '#include "examples/moe_trainer/loss.hpp"\n',
}


def body(lines):
    return "".join(f"  int a{n} = {n};\n" for n in range(lines))


def breaches_of(files):
    with tempfile.TemporaryDirectory() as folder:
        for name, text in files.items():
            path = Path(folder) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        return tidy.breaches(folder)


class Rules(unittest.TestCase):
    def expect(self, rule, name, text, line=None):
        found = [b for b in breaches_of({**CLEAN, name: text}) if b.rule == rule]
        self.assertEqual(len(found), 1, f"{rule} in {name}: {[str(b) for b in found]}")
        self.assertIn(found[0].file, (name, name.split("/")[0]))
        if line is not None:
            self.assertEqual(found[0].line, line)

    def expect_none(self, rule, name, text):
        self.assertEqual([str(b) for b in breaches_of({**CLEAN, name: text}) if b.rule == rule], [])

    def test_clean_tree_is_silent(self):
        self.assertEqual([str(b) for b in breaches_of(CLEAN)], [])

    def test_includes_that_go_up(self):
        self.expect("layering", "runtime/clock.hpp", '#pragma once\n#include "allocator/pool.hpp"\n', 2)
        self.expect("layering", "swapcore/a.hpp", '#  include "hooks/a.hpp"\n')
        self.expect("layering", "allocator/a.hpp", '#include "swapcore/site.hpp"\n')
        self.expect("layering", "tests/runtime/a_test.cpp", '#include "swapcore/site.hpp"\n')

    def test_includes_that_go_sideways(self):
        self.expect("layering", "hooks/a.hpp", '#include "daemon/a.hpp"\n')
        self.expect("layering", "daemon/a.hpp", '#include "examples/a.hpp"\n')
        self.expect("layering", "examples/quickstart/a.cpp", '#include "examples/moe_trainer/a.hpp"\n')
        self.expect("layering", "examples/quickstart/a.cpp", '#include "hooks/c_abi/terrace.h"\n')
        self.expect("layering", "runtime/clock.hpp", '#include "../runtime/a.hpp"\n')

    def test_cuda_headers_outside_their_folder(self):
        self.expect("cuda", "allocator/a.hpp", "#include <cuda.h>\n")
        self.expect("cuda", "hooks/a.hpp", "#include <cuda_runtime.h>\n")
        self.expect_none("cuda", "examples/moe_trainer/ops/cuda/a.cu", "#include <cuda_runtime.h>\n")

    def test_long_files(self):
        self.expect("file-length", "runtime/clock.hpp", "\n" * 601)
        self.expect_none("file-length", "runtime/clock.hpp", "\n" * 600)

    def test_long_functions(self):
        self.expect("function-length", "daemon/a.cpp", f"\nvoid f(int a) {{\n{body(69)}}}\n", 2)
        self.expect_none("function-length", "daemon/a.cpp", f"void f(int a) {{\n{body(68)}}}\n")
        self.expect("function-length", "bench/a.py", "def f():\n" + "    a = 1\n" * 70)
        self.expect("function-length", "dev", "f() {\n" + "  a=1\n" * 69 + "}\n")

    def test_banned_names(self):
        self.expect("banned-name", "daemon/string_" + "utils.hpp", "")
        self.expect("banned-name", "daemon/" + "common/a.hpp", "")
        self.expect("banned-name", "daemon/a.hpp", "// a class that helps\nclass Pool" + "Manager {};\n", 2)
        self.expect("banned-name", "daemon/a.hpp", "enum class Misc" + "Kind { kA };\n")
        self.expect_none("banned-name", "daemon/a.hpp", "struct Commonwealth {};  // class Manager\n")

    def test_dead_links(self):
        self.expect("dead-link", "docs/a.md", "\n[x](missing.md)\n", 2)
        self.expect("dead-link", "docs/a.md", "[x](README.md#no-such-heading)\n")
        self.expect_none("dead-link", "docs/a.md", "[x](../runtime/clock.hpp) `[x](y)`\n")

    def test_folders(self):
        self.expect("readme", "daemon/a.hpp", "")
        self.expect("readme", "runtime/README.md", "\n" * 41)
        self.expect("top-level", "attic/a.md", "")

    def test_words(self):
        self.expect("unfinished", "daemon/a.hpp", "int a;  // TO" + "DO: more\n", 1)
        self.expect("unfinished", "docs/a.md", "FIX" + "ME\n")
        self.expect("machine-path", "docs/a.md", "\nrun /ro" + "ot/x/y\n", 2)
        self.expect("machine-path", "daemon/a.hpp", 'const char* p = "/ho' + 'me/me/x";\n')
        self.expect_none("machine-path", "docs/a.md", "[x](docs/work/a) and tests/home/a and https://a.org/work/b\n")

    def test_sources_without_a_test(self):
        self.expect("untested", "runtime/arena.cpp", '#include "runtime/arena.hpp"\n')
        self.expect_none("untested", "runtime/clock_linux.cpp", '#include "runtime/clock.hpp"\n')

    def test_parts_tested_through_another_test(self):
        part, through = next(iter(tidy.TESTED_THROUGH.items()))
        text = '#include "runtime/part_of_something.hpp"\n'
        self.expect("untested", part, text)
        both = {**CLEAN, part: text, through: ""}
        self.assertEqual([str(b) for b in breaches_of(both) if b.rule == "untested"], [])
        own_test = f"tests/runtime/{Path(part).stem}_test.cpp"
        found = [b for b in breaches_of({**both, own_test: ""}) if b.rule == "untested"]
        self.assertIn("take it out", found[0].text)


class CppScan(unittest.TestCase):
    def names(self, text):
        return [f.name for f in cpp_scan.functions(text)]

    def test_finds_functions_of_every_shape(self):
        text = """
namespace a::b {
template <class T, class U = std::vector<int>>
T pick(T x) { return T{x}; }
class Pool : public Base<decltype(pick(1))> {
 public:
  explicit Pool(int a) : a_{a}, b_(a) { c_ = {1, 2}; }
  ~Pool() override { if (a_) { while (true) { } } }
  Bytes size() const { return [&] { return a_; }(); }
 private:
  int a_{0};
  std::vector<int> c_ = {1, 2};
};
struct alignas(64) Line { int a; };
Result<int> Pool::take(Stream s, const Options& o) noexcept { return {}; }
TEST(Pool, Takes) { EXPECT_EQ(1, 1); }
}
extern "C" int main(void) { return 0; }
__global__ void kernel(float* x) { x[0] = 1; }
"""
        expected = ["pick", "Pool", "~Pool", "size", "Pool::take", "TEST(Pool, Takes)", "main", "kernel"]
        self.assertEqual(self.names(text), expected)

    def test_braces_in_literals_and_directives_do_not_count(self):
        text = 'void f() { auto a = "{"; char b = \'{\'; auto c = R"x({{)x"; int d = 1\'000; /* { */ }  // {\nvoid g() { }\n'
        self.assertEqual(self.names(text), ["f", "g"])
        text = "#ifdef A\nvoid f() {\n#else\nvoid f(int) {\n#endif\n}\n#define X { \\\n  {\nvoid g() { }\n"
        self.assertEqual(self.names(text), ["f", "g"])

    def test_length_counts_header_and_brace(self):
        found = cpp_scan.functions("ROW(a)\nROW(b)\n\nint f(int a,\n      int b) {\n  return a;\n}\n")
        self.assertEqual([(f.first_line, f.lines) for f in found], [(4, 4)])


@unittest.skipUnless(shutil.which("clang-tidy"), "clang-tidy is not installed")
class Names(unittest.TestCase):
    def errors_in(self, source):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "sample.cpp"
            path.write_text(source, encoding="utf-8")
            config = Path(__file__).resolve().parents[2] / ".clang-tidy"
            command = ["clang-tidy", f"--config-file={config}", "--quiet", str(path), "--", "-std=c++20"]
            answer = subprocess.run(command, capture_output=True, text=True, check=False)
            return [line for line in answer.stdout.split("\n") if "readability-identifier-naming" in line]

    def test_good_names_pass(self):
        good = """
namespace terrace {
inline constexpr int kLimit = 3;
enum class Tier { kHbm, kDdr };
template <class T> concept Sized = requires(T t) { t.size(); };
class Pool {
 public:
  struct Options { int budget_bytes = kLimit; };
  int take(int size) const { const int left = size_ - size; return left; }
 private:
  int size_ = 0;
};
}
int cudaMallocAsync(void** out_pointer) { return out_pointer != nullptr; }
"""
        self.assertEqual(self.errors_in(good), [])

    def test_each_bad_name_is_an_error(self):
        for bad in ["class bad_type {};", "struct S { int bad_; };", "class S { int bad; };", "void BadFunction();",
                    "void f(int BadParameter);", "void f() { int BadLocal = 0; }", "constexpr int bad_constant = 1;",
                    "enum class E { kGood, bad };", "namespace Bad {}", "#define bad_macro 1"]:
            errors = self.errors_in(bad + "\n")
            self.assertEqual(len(errors), 1, bad)
            self.assertIn("error:", errors[0])


if __name__ == "__main__":
    unittest.main()
