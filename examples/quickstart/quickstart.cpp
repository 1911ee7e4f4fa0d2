// One operator's output, offered in forward and fetched in backward, within a budget of device memory.
#include <cstdio>

#include "swapcore/session.hpp"

using namespace terrace;

int main() {
  const auto device = open_device("auto", {});
  if (!device.ok()) return std::fprintf(stderr, "%s\n", device.error().text.c_str()), 1;
  const auto stream = (*device)->create_stream(StreamPriority::kNormal);
  Session::Options options;
  options.compute = *stream;
  options.policy.hbm.budget = Amount::of(256_MiB);
  {
    const auto session = Session::open(**device, options);
    if (!session.ok()) return std::fprintf(stderr, "%s\n", session.error().text.c_str()), 1;
    Session& terrace = **session;
    const SiteId fc1 = terrace.declare({"layer.0.fc1", SiteKind::kMatmul, 0, "fc1"});
    for (int step = 0; step < 3; ++step) {
      terrace.begin_step();
      terrace.enter_forward(0);
      BlockRef output = terrace.allocate(64_MiB, Pool::kActivation).value();
      if (!(*device)->fill(*stream, output->address, 7, output->size).ok()) return 1;  // your operator
      terrace.offer({fc1}, output);
      output.reset();  // from here on Terrace decides: keep it, move it to host memory, or drop it
      terrace.enter_head();
      terrace.enter_backward(0);
      output = terrace.fetch({fc1}, 64_MiB);
      std::printf("step %d: %s\n", step, output ? "kept: use it" : "not kept: compute it again");
      if (!output) {
        output = terrace.allocate(64_MiB, Pool::kActivation).value();
        if (!(*device)->fill(*stream, output->address, 7, output->size).ok()) return 1;
      }
      output.reset();
      terrace.end_step();
    }
    std::printf("%s, peak %s\n", terrace.plan_summary().c_str(),
                format_bytes(terrace.hbm_usage().mapped_peak).c_str());
  }
  (*device)->destroy_stream(*stream);
}
