#!/usr/bin/env bash
# The private jemalloc that allocator/small_blocks.cpp stands on. docs/design/0010-private-jemalloc.md says why it is
# built from source.
#
#   jemalloc.sh where             the folder it is in, or would be built into
#   jemalloc.sh ready             exit code 0 if it is built
#   jemalloc.sh build [TARBALL]   builds it unless it is there; without TARBALL the source comes through apt-get
#   jemalloc.sh sources FOLDER    writes this machine's package sources to FOLDER, asking for source packages
#
# It is kept in the user's cache folder, under a name made of what decides its bytes, so that all clones share it and
# removing a build folder does not remove it; in build/deps where that cannot be written.
set -euo pipefail

readonly kVersion=5.3.0
readonly kChecksum=2db82d1e7119df3e71b7640219b6dfe84789bc0537983c3b7ac4f7189aecfeaa
readonly kPrefix=terrace_je_
# One automatic arena, for jemalloc's own needs; caches are made by hand. No extent is kept back from the hooks, and
# none given to them before it is asked for: pinned memory is dear to get.
readonly kConf=narenas:1,tcache:false,retain:false,dirty_decay_ms:-1,muzzy_decay_ms:0
readonly -a kOptions=(
  "--with-jemalloc-prefix=$kPrefix" "--with-private-namespace=${kPrefix}private_" --without-export  # no name of malloc's
  --disable-initial-exec-tls                                                            # may be loaded late
  --disable-cxx --disable-libdl                                                         # takes nobody's place
  --disable-stats --disable-fill --disable-cache-oblivious                              # exact sizes, no ballast
  "--with-malloc-conf=$kConf"
)

say() { printf 'jemalloc: %s\n' "$*" >&2; }
fail() { say "$*"; exit 1; }

script=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)/$(basename "${BASH_SOURCE[0]}")
root=$(dirname "$(dirname "$script")")
readonly script root

folder_name() {
  local key
  key=$({
    declare -p kChecksum kOptions
    declare -f compile install_into
    uname -m
    "${CC:-cc}" --version 2>/dev/null | head -n 1
  } | sha256sum | cut -c 1-12)
  printf 'jemalloc-%s-%s\n' "$kVersion" "$key"
}

is_built() { [ -f "$1/lib/libterrace_jemalloc.a" ] && [ -f "$1/include/terrace_jemalloc.h" ]; }

# Whether a folder could be made at that path.
is_writable() {
  local folder=$1
  while [ ! -e "$folder" ]; do folder=$(dirname "$folder"); done
  [ -d "$folder" ] && [ -w "$folder" ]
}

where() {
  local name cache=${XDG_CACHE_HOME:-${HOME:+$HOME/.cache}}
  name=$(folder_name)
  local -a places=()
  case $cache in /*) places+=("$cache/terrace/$name") ;; esac
  places+=("$root/build/deps/$name")
  local place
  for place in "${places[@]}"; do
    if is_built "$place"; then printf '%s\n' "$place"; return; fi
  done
  for place in "${places[@]}"; do
    if is_writable "$place"; then printf '%s\n' "$place"; return; fi
  done
  fail "neither of these folders can be written: ${places[*]}"
}

# The machine's own package sources, whatever they are, turned to source packages.
write_sources() {
  local list='' parts='' file
  eval "$(apt-config shell list Dir::Etc::sourcelist/f parts Dir::Etc::sourceparts/d)"
  mkdir -p "$1"
  for file in "$list" "$parts"/*.list "$parts"/*.sources; do
    [ -f "$file" ] || continue
    case $file in
      *.sources) sed -E 's/^Types:.*/Types: deb-src/I' "$file" >"$1/$(basename "$file")" ;;
      *) sed -nE 's/^[[:space:]]*deb(-src)?([[:space:]].*)/deb-src\2/p' "$file" | sort -u >"$1/$(basename "$file")" ;;
    esac
  done
}

# Prints the path of the tarball. apt-get checks signature and checksum, as for any package.
fetch() {
  local work=$1 archive=$1/jemalloc_$kVersion.orig.tar.bz2
  command -v apt-get >/dev/null ||
    fail "no apt-get here: download jemalloc-$kVersion.tar.bz2 and run cmake/jemalloc.sh build TARBALL"
  mkdir -p "$work/lists/partial" "$work/cache/archives/partial"
  write_sources "$work/sources"
  local -a options=(-q -o Dir::Etc::sourcelist=/dev/null -o "Dir::Etc::sourceparts=$work/sources"
    -o "Dir::State::Lists=$work/lists" -o "Dir::Cache=$work/cache" -o APT::Sandbox::User=root
    -o Acquire::Retries=3)
  # A repository of somebody else's may fail or lack sources: what counts is whether jemalloc's comes.
  {
    apt-get "${options[@]}" update || true
    (cd "$work" && apt-get "${options[@]}" --download-only source jemalloc) || true
  } >"$work/apt.log" 2>&1
  if [ ! -f "$archive" ]; then
    cat "$work/apt.log" >&2
    fail "apt-get gave no source of jemalloc $kVersion; with a copy of it: cmake/jemalloc.sh build TARBALL"
  fi
  printf '%s\n' "$archive"
}

compile() {
  local work=$1 jobs
  jobs=$(nproc)
  (
    cd "$work/jemalloc-$kVersion"
    # No setting of the caller's may change what the folder's name stands for.
    unset CFLAGS CPPFLAGS LDFLAGS LIBS EXTRA_CFLAGS MAKEFLAGS
    ./configure "CC=${CC:-cc}" "${kOptions[@]}" && make -j "$jobs" lib/libjemalloc_pic.a
  ) >"$work/build.log" 2>&1 || { tail -n 30 "$work/build.log" >&2; fail "building jemalloc $kVersion failed"; }
}

# What the tests of the whole can show only after a full build.
check_archive() {
  local foreign relocations
  foreign=$(nm --defined-only -g "$1" | awk 'NF == 3 {print $3}' | grep -v "^$kPrefix" || true)
  [ -z "$foreign" ] || fail "the archive defines names without our prefix: ${foreign//$'\n'/ }"
  relocations=$(readelf -Wr "$1")
  ! grep -qE 'R_X86_64_(GOT)?TPOFF|R_AARCH64_TLSIE' <<<"$relocations" || fail "the archive uses initial-exec storage"
}

install_into() {
  local work=$1 target=$2 built
  mkdir -p "$(dirname "$target")"
  built=$(mktemp -d "$target.XXXXXX")
  chmod 755 "$built"
  mkdir "$built/lib" "$built/include"
  cp "$work/jemalloc-$kVersion/lib/libjemalloc_pic.a" "$built/lib/libterrace_jemalloc.a"
  cp "$work/jemalloc-$kVersion/include/jemalloc/jemalloc.h" "$built/include/terrace_jemalloc.h"
  cp "$work/jemalloc-$kVersion/COPYING" "$built/COPYING"
  strip --strip-debug "$built/lib/libterrace_jemalloc.a"
  # In one step: another clone may be building the same. Whoever comes second throws its own away.
  is_built "$target" || rm -rf "$target"
  mv -T "$built" "$target" 2>/dev/null || rm -rf "$built"
  is_built "$target" || fail "$target cannot be written"
}

build() {
  local target work archive
  target=$(where)
  if is_built "$target"; then return; fi
  work=$(mktemp -d)
  # shellcheck disable=SC2064
  trap "rm -rf '$work'" EXIT
  say "building jemalloc $kVersion, private to Terrace (about a minute)"
  archive=${1:-}
  [ -n "$archive" ] || archive=$(fetch "$work")
  [ -f "$archive" ] || fail "there is no file $archive"
  printf '%s  %s\n' "$kChecksum" "$archive" | sha256sum --check --status ||
    fail "$archive is not jemalloc $kVersion as released (its checksum differs)"
  tar -xjf "$archive" -C "$work"
  compile "$work"
  check_archive "$work/jemalloc-$kVersion/lib/libjemalloc_pic.a"
  install_into "$work" "$target"
  say "built in $target"
}

case ${1:-} in
  where) where ;;
  ready) is_built "$(where)" ;;
  build) build "${2:-}" ;;
  sources) write_sources "${2:?sources needs a folder}" ;;
  *) fail "usage: jemalloc.sh where | ready | build [TARBALL] | sources FOLDER" ;;
esac
