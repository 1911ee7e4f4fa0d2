// What the CPU operators do when the device or the scratch memory says no, and when shapes make no sense.
#include "runtime/fault.hpp"
#include "tests/trainer/ops_fixture.hpp"

namespace terrace::trainer {
namespace {

class NoScratch final : public ScratchSource {
 public:
  std::shared_ptr<const void> take(Bytes, Address*) override { throw std::runtime_error("no scratch left"); }
};

TEST(OpLaunch, AFailedLaunchThrowsTheDevicesText) {
  OpsBench bench("emulated");
  const float* a = bench.upload(Values{1, 2});
  float* out = bench.upload(Values{0, 0});
  {
    const ScopedFaults faults(fail_call(FaultPoint::kDeviceLaunch, 1));
    EXPECT_THROW(bench.ops().run(bench.stream(), Add{2, a, a, out}), std::runtime_error);
    EXPECT_TRUE(faults.fired());
  }
  EXPECT_EQ(bench.download(out, 2), (Values{0, 0}));
  bench.ops().run(bench.stream(), Add{2, a, a, out});
  EXPECT_EQ(bench.download(out, 2), (Values{2, 4}));
}

TEST(OpLaunch, RefusedScratchReachesTheCaller) {
  OpsBench bench("emulated");
  NoScratch none;
  const std::unique_ptr<Ops> ops = make_ops(bench.device(), none).value();
  float* out = bench.zeros(1);
  EXPECT_THROW(ops->run(bench.stream(), SumOfSquares{1, out, out}), std::runtime_error);
  ops->run(bench.stream(), Add{1, out, out, out});  // needs none
}

TEST(OpLaunch, ShapesThatMakeNoSenseThrow) {
  OpsBench bench("emulated");
  float* x = bench.zeros(64);
  std::int32_t* expert = bench.int_output(64);
  EXPECT_THROW(bench.ops().run(bench.stream(), CausalConv{1, 1, 1, 17, x, x, x}), std::runtime_error);
  EXPECT_THROW(bench.ops().run(bench.stream(), Router{{1, 8, 5, 4, 2, 1.0F}, x, x, expert, x}),
               std::runtime_error);
  EXPECT_THROW(bench.ops().run(bench.stream(), Router{{1, 8, 9, 1, 1, 1.0F}, x, x, expert, x}),
               std::runtime_error);
}

}  // namespace
}  // namespace terrace::trainer
