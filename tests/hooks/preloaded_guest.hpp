// memory_guest (guests/memory_guest.cpp) in front of the loopback CUDA, with and without the preload library.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <sstream>
#include <string>
#include <vector>

#include "tests/hooks/guest_process.hpp"
#include "tests/hooks/page_collector.hpp"
#include "tests/paths.hpp"

namespace terrace::test {

using Settings = std::vector<std::string>;

inline Settings bare_guest() {
  const std::string folder = shared_library("loopback").string();
  return {"LD_PRELOAD=", "TERRACE_SOCKET=", "LD_LIBRARY_PATH=" + folder + ":" + folder + "/cuda12"};
}
// The first of two settings of one name counts.
inline Settings preloaded_guest(Settings more = {}) {
  Settings plain = bare_guest();
  plain[0] += shared_library("libterrace_preload.so").string();
  more.insert(more.end(), plain.begin(), plain.end());
  return more;
}
// With the smallest budget that the scenes are written for.
inline Settings with_gibibyte(Settings more = {}) {
  more.emplace_back("TERRACE_HBM_BUDGET=1GiB");
  return preloaded_guest(std::move(more));
}

inline Ended run_guest(const std::string& scene, const Settings& settings,
                       const std::string& guest = "memory_guest13") {
  return run_program({program(guest.c_str()).string(), scene}, settings);
}

// The values of the guest's lines that begin with `what`, in order.
inline std::vector<long long> values_of(const Ended& ended, const std::string& what) {
  std::vector<long long> values;
  std::istringstream lines(ended.out);
  for (std::string line; std::getline(lines, line);) {
    const std::size_t last = line.rfind(' ');
    if (last != std::string::npos && line.substr(0, last) == what)
      values.push_back(std::stoll(line.substr(last)));
  }
  return values;
}
// The only such value; -1 where there is none or there are several.
inline long long value_of(const Ended& ended, const std::string& what) {
  const auto values = values_of(ended, what);
  return values.size() == 1 ? values[0] : -1;
}

}  // namespace terrace::test
