#!/usr/bin/env python3
"""The house rules that a machine can check. `tidy.py ROOT` prints one line a breach and exits 1 if there is any."""

import ast
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

sys.path.insert(0, str(Path(__file__).resolve().parent))
import cpp_scan  # noqa: E402

MOST_FILE_LINES = 600
MOST_FUNCTION_LINES = 70
MOST_README_LINES = 40
CPP = {".hpp", ".h", ".cpp", ".c", ".cu", ".cuh"}
TEXT = CPP | {".py", ".sh", ".md", ".txt", ".toml", ".cmake", ".json", ".yml", ".yaml", ".def", ".supp", ".map", ""}
TOP_FOLDERS = ["runtime", "allocator", "swapcore", "hooks", "daemon", "examples", "tests", "bench", "dashboards", "docs", "cmake"]
TOP_FILES = ["dev", "CMakeLists.txt", "README.md", "LICENSE", "CONTRIBUTING.md", "CHANGELOG.md", "CMakePresets.json"]
BELOW = {
    "runtime": {"runtime"},
    "allocator": {"allocator", "runtime"},
    "swapcore": {"swapcore", "allocator", "runtime"},
    "hooks": {"hooks", "swapcore", "allocator", "runtime"},
    "daemon": {"daemon", "swapcore", "allocator", "runtime"},
    "examples": {"examples", "swapcore", "allocator", "runtime"},
}
# Programs that show the C ABI may include its header, and nothing else of hooks/.
C_ABI_USERS = ("examples/c_api/", "examples/pytorch/")
LAYERS_WITHOUT_CUDA = ("runtime/", "allocator/", "swapcore/", "daemon/", "hooks/")
# Parts that only one test of a whole can reach, and that test. An entry that is no longer needed is a breach.
TESTED_THROUGH = {
    "runtime/cuda/cuda_memory.cpp": "tests/runtime/cuda_device_test.cpp",
    "runtime/cuda/cuda_work.cpp": "tests/runtime/cuda_device_test.cpp",
    "runtime/cuda/driver.cpp": "tests/runtime/cuda_device_test.cpp",
    "runtime/emulated/emulated_memory.cpp": "tests/runtime/emulated_device_test.cpp",
    "runtime/emulated/link.cpp": "tests/runtime/emulated_device_test.cpp",
    "runtime/emulated/physical_memory.cpp": "tests/runtime/emulated_device_test.cpp",
    "runtime/emulated/stream.cpp": "tests/runtime/emulated_device_test.cpp",
}
BANNED = {"util", "utils", "common", "helper", "helpers", "manager", "managers", "misc"}
# Built from parts, so that this file does not breach its own rules.
UNFINISHED = re.compile(r"\b(" + "|".join(["TO" + "DO", "FIX" + "ME", "X" * 3]) + r")\b")
MACHINE_PATH = re.compile(r"(?<![\w./:$}-])/(" + "|".join(["work", "root", "home", "farm"]) + r")/")
INCLUDE = re.compile(r'^\s*#\s*include\s+(["<])([^">]+)[">]')
TYPE = re.compile(r"\b(?:class|struct|enum class|enum struct|enum|union|concept)\s+(?:\[\[\w+\]\]\s*)?([A-Za-z_]\w*)")
LINK = re.compile(r"\[[^\]]*\]\(\s*<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\s*\)")


@dataclass(frozen=True)
class Breach:
    rule: str
    file: str
    line: int
    text: str

    def __str__(self):
        return f"{self.file}:{self.line}: {self.text} [{self.rule}]"


def files_of(root):
    """Relative names of the tree's own files: what git knows or would add, else all but build outputs."""
    command = ["git", "-C", str(root), "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    if (root / ".git").exists():
        answer = subprocess.run(command, capture_output=True, check=False)
        if answer.returncode == 0:
            names = answer.stdout.decode().split("\0")
            return sorted(name for name in names if name and (root / name).is_file())
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = [f for f in folders if f not in ("build", "bundle", "shared", ".git", "__pycache__")]
        found += [(Path(folder) / name).relative_to(root).as_posix() for name in names]
    return sorted(found)


class Tree:
    def __init__(self, root):
        self.root = Path(root).resolve()
        self.files = files_of(self.root)
        self._text = {}

    def text(self, name):
        if name not in self._text:
            self._text[name] = (self.root / name).read_text(encoding="utf-8", errors="replace")
        return self._text[name]

    def of(self, suffixes):
        return [name for name in self.files if PurePosixPath(name).suffix in suffixes]


def includes(text):
    for number, line in enumerate(text.split("\n"), 1):
        found = INCLUDE.match(line)
        if found:
            yield number, found.group(1), found.group(2)


def room_of(name):
    """The layer whose rules hold for a file: tests/<layer>/ may include what the layer itself may."""
    parts = name.split("/")
    if parts[0] == "tests" and len(parts) > 2:
        return "examples" if parts[1] == "trainer" else parts[1]
    return parts[0]


def may_include(name, path):
    top = path.split("/")[0]
    room = room_of(name)
    if top not in BELOW or room not in BELOW:
        return True
    if path.startswith("hooks/c_abi/") and name.startswith(C_ABI_USERS):
        return True
    if top == room == "examples" and not name.startswith("tests/"):
        return path.split("/")[1] == name.split("/")[1]
    return top in BELOW[room]


def layering(tree):
    for name in tree.of(CPP):
        for line, quote, path in includes(tree.text(name)):
            if quote == '"' and not may_include(name, path):
                yield Breach("layering", name, line, f'includes "{path}": includes go down only')
            if quote == '"' and path.startswith("../"):
                yield Breach("layering", name, line, f'includes "{path}": write it relative to the root')
            outside = name.startswith(LAYERS_WITHOUT_CUDA) and not name.startswith("runtime/cuda/")
            if outside and re.fullmatch(r"cuda\w*\.h|nccl\.h|cublas\w*\.h", path):
                yield Breach("cuda", name, line, f"includes {path}: only runtime/cuda/ may")


def file_length(tree):
    for name in tree.of(CPP | {".py", ".cmake", ".sh"}) + [n for n in tree.files if n in ("dev", "CMakeLists.txt")]:
        lines = tree.text(name).count("\n")
        if lines > MOST_FILE_LINES:
            yield Breach("file-length", name, lines, f"{lines} lines; at most {MOST_FILE_LINES}: make it two")


def python_functions(text):
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield cpp_scan.Function(node.name, node.lineno, node.end_lineno)


def shell_functions(text):
    start = None
    for number, line in enumerate(text.split("\n"), 1):
        opened = re.match(r"(\w+)\(\) \{$", line)
        if opened:
            start = (opened.group(1), number)
        elif line == "}" and start:
            yield cpp_scan.Function(start[0], start[1], number)
            start = None


def function_length(tree):
    readers = {".py": python_functions, ".sh": shell_functions, "": shell_functions}
    for name in tree.of(CPP | {".py", ".sh", ""}):
        read = readers.get(PurePosixPath(name).suffix, cpp_scan.functions)
        for function in read(tree.text(name)):
            if function.lines > MOST_FUNCTION_LINES:
                text = f"{function.name} has {function.lines} lines; at most {MOST_FUNCTION_LINES}"
                yield Breach("function-length", name, function.first_line, text)


def words_of(identifier):
    parts = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", identifier)
    return {part.lower() for part in parts}


def banned_names(tree):
    for name in tree.files:
        for part in PurePosixPath(name).parts:
            bad = words_of(PurePosixPath(part).stem) & BANNED
            if bad:
                yield Breach("banned-name", name, 1, f"named \"{bad.pop()}\": say what it is about")
    for name in tree.of(CPP):
        code = cpp_scan.blank_out(tree.text(name))
        for found in TYPE.finditer(code):
            bad = words_of(found.group(1)) & BANNED
            if bad:
                line = code.count("\n", 0, found.start()) + 1
                yield Breach("banned-name", name, line, f"type {found.group(1)}: say what it is")


def prose_of(markdown):
    """Markdown without its fenced blocks and code spans, newlines kept."""
    blank = lambda found: re.sub(r"[^\n]", " ", found.group(0))  # noqa: E731
    return re.sub(r"`[^`\n]*`", blank, re.sub(r"^(```|~~~).*?^\1", blank, markdown, flags=re.M | re.S))


def anchors_of(markdown):
    titles = re.findall(r"^#+\s+(.*?)\s*#*$", re.sub(r"^(```|~~~).*?^\1", "", markdown, flags=re.M | re.S), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def dead_links(tree):
    for name in tree.of({".md"}):
        prose = prose_of(tree.text(name))
        for found in LINK.finditer(prose):
            target = found.group(1)
            line = prose.count("\n", 0, found.start()) + 1
            if re.match(r"[a-z]+:", target):
                continue
            path, _, anchor = target.partition("#")
            where = (tree.root / name).parent / path if path else tree.root / name
            if not where.exists():
                yield Breach("dead-link", name, line, f"{target} does not exist")
            elif anchor and where.suffix == ".md" and anchor not in anchors_of(where.read_text(encoding="utf-8")):
                yield Breach("dead-link", name, line, f"{target}: no such heading")


def folders(tree):
    present = {name.split("/")[0] for name in tree.files if "/" in name}
    for folder in sorted(present & set(TOP_FOLDERS)):
        readme = f"{folder}/README.md"
        if readme not in tree.files:
            yield Breach("readme", folder, 1, "has no README.md: what it is for, what it may include, what to read first")
        elif tree.text(readme).count("\n") > MOST_README_LINES:
            yield Breach("readme", readme, MOST_README_LINES + 1, f"more than {MOST_README_LINES} lines")
    for name in sorted({name.split("/")[0] for name in tree.files}):
        if not name.startswith(".") and name not in TOP_FOLDERS + TOP_FILES:
            yield Breach("top-level", name, 1, "is not one of the top folders: see docs/design/0001-layers.md")


def words(tree):
    for name in tree.of(TEXT):
        if name == "LICENSE":
            continue
        for number, line in enumerate(tree.text(name).split("\n"), 1):
            if UNFINISHED.search(line):
                yield Breach("unfinished", name, number, "finish it or leave it out")
            if MACHINE_PATH.search(line):
                yield Breach("machine-path", name, number, "a path of one machine")


def tested(tree):
    """Each x.cpp of the lower layers has a test named after it, a test of its layer that includes x.hpp, or a row in
    the table of parts."""
    for layer in ("runtime", "allocator", "swapcore"):
        tests = [n for n in tree.of({".cpp"}) if n.startswith(f"tests/{layer}/")]
        named = {PurePosixPath(n).stem for n in tests}
        included = {path for n in tests for _, quote, path in includes(tree.text(n)) if quote == '"'}
        for name in tree.of({".cpp"}):
            if not name.startswith(layer + "/"):
                continue
            own = name[: -len(".cpp")] + ".hpp"
            found = PurePosixPath(name).stem + "_test" in named or own in included
            found = found or declared_in_tested_header(tree, name, included)
            through = TESTED_THROUGH.get(name)
            if not found and through not in tree.files:
                yield Breach("untested", name, 1, f"no test in tests/{layer}/ is named after it or includes its header")
            if found and through:
                yield Breach("untested", name, 1, "has a test of its own: take it out of TESTED_THROUGH in tidy.py")


def declared_in_tested_header(tree, name, included):
    """A source whose contract is another header (device.hpp, say) counts as tested through that header."""
    folder = name.split("/")[0]
    own = [path for _, quote, path in includes(tree.text(name)) if quote == '"' and path.startswith(folder + "/")]
    return bool(own) and own[0] in included


RULES = [layering, file_length, function_length, banned_names, dead_links, folders, words, tested]


def breaches(root):
    tree = Tree(root)
    return [breach for rule in RULES for breach in rule(tree)]


def main(arguments):
    if len(arguments) != 2:
        print("usage: tidy.py ROOT", file=sys.stderr)
        return 2
    found = breaches(arguments[1])
    for breach in found:
        print(breach)
    print(f"tidy: {len(found)} breach{'' if len(found) == 1 else 'es'} of the house rules", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
