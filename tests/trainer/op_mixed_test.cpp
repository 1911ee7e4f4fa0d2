// bf16 on the CPU: stand-ins, what is converted when, and what an operator without them says.
#include "examples/moe_trainer/ops/cpu/mixed.hpp"

#include <atomic>
#include <limits>

#include "tests/trainer/ops_fixture.hpp"

namespace terrace::trainer {
namespace {

TEST(OpMixed, ConvertsAsTheTypesDo) {
  std::vector<float> from{0.0F, -0.0F, 1.0F, 1.00390625F, 1.01171875F, 3.4e38F, -1e-40F, 1e-45F};
  from.push_back(std::numeric_limits<float>::infinity());
  from.push_back(std::numeric_limits<float>::quiet_NaN());
  for (const double value : random_values(40000, 1, 1e3)) from.push_back(static_cast<float>(value));
  const auto count = static_cast<std::int64_t>(from.size());
  std::vector<Bf16> halves(from.size());
  std::vector<float> back(from.size());
  cpu::narrow(from.data(), halves.data(), count);
  cpu::widen(halves.data(), back.data(), count);
  for (std::size_t i = 0; i < from.size(); ++i) {
    EXPECT_EQ(halves[i].bits, to_bf16(from[i]).bits) << from[i];
    const float one = to_float(halves[i]);
    EXPECT_EQ(std::memcmp(&one, &back[i], sizeof one), 0) << from[i];
  }
  EXPECT_TRUE(std::isnan(back[9]));
}

struct Arrays {
  In x, missing;
  Out y, z, f32;
};
template <typename F>
void visit_arrays(Arrays& op, F&& visit) {
  visit(op.x, 3);
  visit(op.missing, 3);
  visit(op.y, 2);
  visit(op.z, 5, Accumulate::kAdd);
  visit(op.f32, 4);
}

TEST(OpMixed, StandInsFollowTheArrays) {
  Bf16 x[5], y[2];
  float f32[4];
  for (int i = 0; i < 5; ++i) x[i] = to_bf16(static_cast<float>(i));
  y[0] = y[1] = to_bf16(-1);
  Arrays op{x, In(nullptr, Dtype::kBf16), y, x, f32};  // z is x, and longer
  cpu::StandIns stand_ins;
  visit_arrays(op, stand_ins);
  std::vector<std::byte> scratch(stand_ins.bytes().count());
  stand_ins.set_base(scratch.data());
  cpu::StandIns::Replace replace(stand_ins);
  visit_arrays(op, replace);
  EXPECT_EQ(op.f32.at(), f32);
  EXPECT_FALSE(op.missing);
  EXPECT_EQ(op.missing.dtype(), Dtype::kF32);
  ASSERT_EQ(op.x.at(), op.z.at());
  EXPECT_NE(op.x.at(), op.y.at());
  stand_ins.convert_in();
  EXPECT_EQ(op.x.f32()[4], 4.0F);
  op.z.f32()[4] = 7;
  op.y.f32()[1] = 9;
  stand_ins.convert_out();
  EXPECT_EQ(to_float(x[4]), 7);
  EXPECT_EQ(to_float(x[3]), 3);
  EXPECT_EQ(to_float(y[0]), -1);  // left alone by the operator
  EXPECT_EQ(to_float(y[1]), 9);
}

struct Halves {  // of rows of four
  In g;
  Out u, none, end;
};
template <typename F>
void visit_arrays(Halves& op, F&& visit) {
  visit(op.none, 0);
  visit(op.g, 6);
  visit(op.u, 6);
  visit(op.end, 2);
}

TEST(OpMixed, OverlappingArraysShareAStandIn) {
  Bf16 x[10];
  for (int i = 0; i < 10; ++i) x[i] = to_bf16(static_cast<float>(i));
  Halves op{x, x + 2, x + 2, x + 8};
  cpu::StandIns stand_ins;
  visit_arrays(op, stand_ins);
  std::vector<std::byte> scratch(stand_ins.bytes().count());
  stand_ins.set_base(scratch.data());
  cpu::StandIns::Replace replace(stand_ins);
  visit_arrays(op, replace);
  EXPECT_EQ(op.u.f32(), op.g.f32() + 2);
  stand_ins.convert_in();
  op.u.f32()[5] = 70;
  op.end.f32()[1] = 90;
  stand_ins.convert_out();
  for (int i = 0; i < 10; ++i) EXPECT_EQ(to_float(x[i]), i == 7 || i == 9 ? 10 * i : i);
}

TEST(OpMixed, WhatAChunkThrowsReachesTheCaller) {
  const auto work = [] {
    cpu::parallel_ranges(100, 1, [](std::int64_t begin, std::int64_t) {
      if (begin % 7 == 3) throw std::runtime_error("chunk");
    });
  };
  EXPECT_THROW(work(), std::runtime_error);
  std::atomic<int> ran = 0;
  cpu::parallel_ranges(100, 1, [&](std::int64_t, std::int64_t) { ++ran; });
  EXPECT_EQ(ran, 100);
}

}  // namespace
}  // namespace terrace::trainer
