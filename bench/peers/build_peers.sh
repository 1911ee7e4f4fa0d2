#!/usr/bin/env bash
# build_peers.sh OUT_DIR: the allocators that ours is measured beside on a GPU, each as a plugin NAME.so.
#
# Built on the machine that runs them, against what is installed there: nvcc, and what python3 finds of the packages
# torch, librmm (pip: librmm-cu13) and rapids_logger. A peer whose package is not there is left out, and said so.
# `./dev bench allocator --device cuda` looks for the plugins in BUILD/lib/peers.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
readonly here root=$here/../..

say() { printf 'build_peers: %s\n' "$*" >&2; }
fail() { say "$*"; exit 1; }

# The folder of a Python package, found without running it; empty where there is none.
package_dir() {
  "${PYTHON:-python3}" - "$1" <<'PY'
import importlib.util, sys
found = importlib.util.find_spec(sys.argv[1])
if found and found.submodule_search_locations:
    print(list(found.submodule_search_locations)[0])
PY
}

# build NAME [COMPILER OPTION...]
build() {
  local name=$1
  shift
  # The runtime inside a plugin stays hidden: a peer's own libraries bring theirs.
  "$nvcc" -std=c++20 -O2 -shared -Xcompiler -fPIC,-fvisibility=hidden -Xlinker --exclude-libs,ALL -I"$root" \
    "$here/$name.cpp" -o "$out/$name.so" "$@" || fail "$name.so could not be built"
  say "$name.so is built"
}

# Options that find a library now and when the plugin is loaded.
library_options() { printf '%s\n' "-L$1" -Xlinker "-rpath,$1"; }

build_pytorch() {
  local torch
  torch=$(package_dir torch)
  [ -n "$torch" ] || { say "pytorch.so is left out: python3 has no package torch"; return 0; }
  local -a libraries
  mapfile -t libraries < <(library_options "$torch/lib")
  build pytorch -isystem "$torch/include" "${libraries[@]}" -lc10_cuda -lc10
}

build_rmm() {
  local rmm logger
  rmm=$(package_dir librmm)
  logger=$(package_dir rapids_logger)
  [ -n "$rmm" ] && [ -n "$logger" ] || {
    say "rmm_pool.so and rmm_arena.so are left out: python3 has no packages librmm and rapids_logger (pip install librmm-cu13)"
    return 0
  }
  # RMM brings the CUDA C++ headers it was built with: they come before the toolkit's, which may be older.
  local -a options libraries
  options=(-isystem "$rmm/include/rapids" -isystem "$rmm/include" -isystem "$logger/include")
  mapfile -t libraries < <(library_options "$rmm/lib64"; library_options "$logger/lib64")
  # Named here too, because librmm.so looks for its logger in its own folder only.
  build rmm_pool "${options[@]}" "${libraries[@]}" -Xlinker --no-as-needed -lrmm -lrapids_logger
  build rmm_arena "${options[@]}" "${libraries[@]}" -Xlinker --no-as-needed -lrmm -lrapids_logger
}

[ $# = 1 ] || fail "usage: build_peers.sh OUT_DIR"
out=$1
nvcc=$(command -v nvcc || true)
[ -n "$nvcc" ] || [ ! -x "${CUDA_HOME:-/usr/local/cuda}/bin/nvcc" ] || nvcc=${CUDA_HOME:-/usr/local/cuda}/bin/nvcc
[ -n "$nvcc" ] || fail "no nvcc on the PATH, in CUDA_HOME or in /usr/local/cuda: the CUDA toolkit is needed"
mkdir -p "$out"
build cuda_malloc
build cuda_async
build_pytorch
build_rmm
