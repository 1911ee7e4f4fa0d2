#!/usr/bin/env python3
"""Makes a folder that runs on a machine with a GPU driver and nothing else of ours: programs, tests, the files they
read, English text, and every shared library that a bare Ubuntu 24.04 lacks. `./dev bundle` calls this."""

import argparse
import json
import lzma
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "examples"))
import training_runs  # noqa: E402  the files of text that it trains on

MOST_BYTES = 64 * 2**20
# The machine's own: the C and C++ runtimes (newer there than here), the driver, and CUDA's libraries.
NOT_CARRIED = re.compile(
    r"^(linux-vdso|ld-linux|libc|libm|libdl|librt|libpthread|libresolv|libutil|libanl|libnss_\w+|libstdc\+\+|libgcc_s|"
    r"libcuda|libcublas|libcublasLt|libcudart|libnccl|libnvidia[\w-]*)[.-]")
SOURCE_SUFFIXES = {".cpp", ".cc", ".c", ".hpp", ".h", ".cu", ".cuh", ".cmake", ".def", ".map"}
COMPILED_THERE = "programs"  # what tests/hooks/compatibility runs
CARRIED_FOLDERS = ("tests/", "examples/", "bench/", "dashboards/")

ENV_SH = r"""# Source this: it lets the bundle's programs and tests find their files and CUDA's libraries.
bundle="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
[ -d "$bundle/bin" ] || tar -xJf "$bundle/binaries.tar.xz" -C "$bundle" || return 1
export TERRACE_SOURCE_DIR="$bundle/source" TERRACE_BUILD_DIR="$bundle" TERRACE_TEXT_DIR="$bundle/text"
export PATH="$bundle/bin:$PATH"
# CUDA's libraries come with the toolkit, or with Python packages (nvidia/*/lib).
terrace_cuda_folders() {
  local folder
  for folder in /usr/local/cuda/lib64 /usr/local/cuda/targets/x86_64-linux/lib; do
    [ ! -d "$folder" ] || printf '%s:' "$folder"
  done
  command -v python3 >/dev/null || return 0
  python3 - <<'PY'
import glob, site, sys, sysconfig
roots = {sysconfig.get_paths()["purelib"], sysconfig.get_paths()["platlib"], *site.getsitepackages(), site.getusersitepackages()}
folders = sorted(f for root in roots for f in glob.glob(root + "/nvidia/*/lib"))
sys.stdout.write("".join(folder + ":" for folder in folders))
PY
}
export LD_LIBRARY_PATH="$(terrace_cuda_folders)${LD_LIBRARY_PATH:-}"
"""

RUN_TESTS_SH = r"""#!/usr/bin/env bash
# run_tests.sh [LABEL] [NAME-PATTERN]: the tests of the bundle; exit code 0 only if at least one ran and none failed.
set -u
cd "$(dirname "${BASH_SOURCE[0]}")" || exit 1
. ./env.sh || exit 1
label=${1:-} pattern=${2:-} ran=0 failed=()
log=$(mktemp)
trap 'rm -f "$log"' EXIT
while IFS=$'\t' read -r name labels limit folder environment command; do
  [ -z "$label" ] || case ";$labels;" in *";$label;"*) ;; *) continue ;; esac
  [ -z "$pattern" ] || [[ $name =~ $pattern ]] || continue
  ran=$((ran + 1))
  if (eval "cd $folder" && eval "exec env ${environment} timeout $limit $command") >"$log" 2>&1 </dev/null; then
    printf 'ok    %s\n' "$name"
    grep -E '^\[  SKIPPED \]|Skipped$' "$log" | sort -u | head -5
  else
    printf 'WRONG %s (exit code %s)\n' "$name" $?
    failed+=("$name")
    tail -n 60 "$log"
  fi
done <tests.list
printf '%s of %s passed\n' $((ran - ${#failed[@]})) "$ran"
[ "$ran" -gt 0 ] && [ ${#failed[@]} = 0 ]
"""

DEMO_SH = r"""#!/usr/bin/env bash
# demo.sh OUT [OPTIONS]: what ./dev demo runs, with its files in OUT. demo.sh /tmp/demo --device cuda --steps 40
set -eu
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"
out=${1:?where to write: demo.sh OUT [OPTIONS]}
shift
exec python3 "$bundle/source/examples/demo.py" --build "$bundle" --out "$out" "$@"
"""


class BundleError(Exception):
    pass


def output_of(command):
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    if answer.returncode != 0:
        raise BundleError(f"{shlex.join(map(str, command))} failed:\n{answer.stderr.strip()}")
    return answer.stdout


def is_elf(path):
    with open(path, "rb") as file:
        return file.read(4) == b"\x7fELF"


def copy_binaries(build, out):
    copied = []
    for folder in ("bin", "lib", "lib/loopback"):
        (out / folder).mkdir(parents=True, exist_ok=True)
        for path in sorted((build / folder).glob("*")):
            target = out / folder / path.name
            if path.is_symlink():
                target.symlink_to(path.readlink())
            elif path.is_file() and is_elf(path):
                shutil.copy2(path, target)
                output_of(["strip", "--strip-unneeded", target])
                copied.append(path)
    if (build / "lib" / "terrace_python").is_dir():
        shutil.copytree(build / "lib" / "terrace_python", out / "lib" / "terrace_python",
                        ignore=shutil.ignore_patterns("__pycache__"))
    if not copied:
        raise BundleError(f"nothing was built in {build}")
    return copied


def copy_libraries(binaries, out):
    """The closure of what the binaries load, less what the target machine has; they find it by their run path."""
    folder = out / "lib" / "bundled"
    folder.mkdir()
    for binary in binaries:
        for line in output_of(["ldd", binary]).split("\n"):
            found = re.match(r"\s*(\S+) => (\S+) \(", line)
            missing = re.match(r"\s*(\S+) => not found", line)
            if missing and not NOT_CARRIED.match(missing.group(1)):
                raise BundleError(f"{binary.name} needs {missing.group(1)}, which this machine lacks")
            if not found or NOT_CARRIED.match(found.group(1)) or Path(found.group(2)).is_relative_to(ROOT):
                continue
            target = folder / found.group(1)
            if not target.exists():
                shutil.copy2(Path(found.group(2)).resolve(), target)
                output_of(["strip", "--strip-unneeded", target])


def copy_files(out):
    names = output_of(["git", "-C", ROOT, "ls-files", "--cached", "--others", "--exclude-standard", "-z"]).split("\0")
    for name in names:
        path = PurePosixPath(name)
        if not name.startswith(CARRIED_FOLDERS) or path.name == "CMakeLists.txt":
            continue
        if path.suffix in SOURCE_SUFFIXES and path.parent.name != COMPILED_THERE:
            continue
        if (ROOT / name).is_file():
            target = out / "source" / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target)
    (out / "text").mkdir()
    for path in training_runs.text_files():
        shutil.copy2(path, out / "text" / path.name)


def moved(text, build):
    """A path of this machine as one of the bundle; the quotes let the shell fill the variable in."""
    for there, here in ((str(build), "$TERRACE_BUILD_DIR"), (str(ROOT), "$TERRACE_SOURCE_DIR")):
        text = text.replace(there, here)
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def test_lines(build):
    answer = json.loads(output_of(["ctest", "--test-dir", build, "--show-only=json-v1"]))
    for test in answer["tests"]:
        properties = {entry["name"]: entry["value"] for entry in test.get("properties", [])}
        labels = properties.get("LABELS", [])
        if {"tidy", "package"} & set(labels):  # about sources and about a build folder, which the machine lacks
            continue
        if "command" not in test:
            raise BundleError(f"the test {test['name']} is not built")
        folder = moved(properties.get("WORKING_DIRECTORY", str(build)), build)
        environment = " ".join(moved(entry, build) for entry in properties.get("ENVIRONMENT", []))
        command = " ".join(moved(part, build) for part in test["command"])
        limit = str(int(properties.get("TIMEOUT", 300)))
        yield "\t".join([test["name"], ";".join(labels), limit, folder, environment or "A=", command])


def write_scripts(build, out):
    (out / "tests.list").write_text("".join(line + "\n" for line in test_lines(build)), encoding="utf-8")
    (out / "env.sh").write_text(ENV_SH, encoding="utf-8")
    for name, text in (("run_tests.sh", RUN_TESTS_SH), ("demo.sh", DEMO_SH)):
        (out / name).write_text(text, encoding="utf-8")
        (out / name).chmod(0o755)


def pack_binaries(out):
    """bin/ and lib/ travel compressed, and env.sh unpacks them: most of them is one library of matrix kernels."""
    # The tests carry the same kernels over and over: a dictionary that reaches from one to the next.
    whole = [{"id": lzma.FILTER_LZMA2, "preset": 4, "dict_size": 256 << 20}]
    with lzma.open(out / "binaries.tar.xz", "wb", filters=whole) as packed, tarfile.open(fileobj=packed, mode="w") as archive:
        for folder in ("bin", "lib"):
            archive.add(out / folder, arcname=folder)
            shutil.rmtree(out / folder)


def check_size(out):
    sizes = sorted(((path.lstat().st_size, path.relative_to(out)) for path in out.rglob("*") if path.is_file()), reverse=True)
    total = sum(size for size, _ in sizes)
    print(f"bundle: {len(sizes)} files, {total / 2**20:.1f} MiB in {out}", file=sys.stderr)
    if total > MOST_BYTES:
        largest = "\n".join(f"  {size / 2**20:6.1f} MiB  {name}" for size, name in sizes[:15])
        raise BundleError(f"more than {MOST_BYTES // 2**20} MiB; the largest:\n{largest}")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--build", required=True, type=Path)
    parser.add_argument("--out", required=True, type=Path)
    options = parser.parse_args()
    build, out = options.build.resolve(), options.out.resolve()
    try:
        if out.exists():
            shutil.rmtree(out)
        binaries = copy_binaries(build, out)
        copy_libraries(binaries, out)
        copy_files(out)
        write_scripts(build, out)
        pack_binaries(out)
        check_size(out)
    except (BundleError, training_runs.RunError) as error:
        print(f"bundle: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
