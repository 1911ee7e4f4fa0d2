#include "hooks/nccl/ring_adapter.hpp"

#include <dlfcn.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <memory>
#include <type_traits>
#include <vector>

#include "allocator/ring/ring_buffers.hpp"
#include "hooks/nccl/library.hpp"
#include "tests/paths.hpp"

#if __has_include(<nccl.h>)
#include <nccl.h>
#endif

namespace terrace::hooks::nccl {
namespace {

#if __has_include(<nccl.h>)
static_assert(std::is_pointer_v<ncclComm_t> && std::is_pointer_v<cudaStream_t>);
static_assert(sizeof(CallResult) == sizeof(ncclResult_t) && sizeof(DataType) == sizeof(ncclDataType_t));
static_assert(kBytes == static_cast<DataType>(ncclUint8) && ncclSuccess == 0);
// The pointers differ in what they point to; there are as many arguments.
template <typename... Ours, typename... Theirs>
constexpr bool alike(CallResult (*)(Ours...), ncclResult_t (*)(Theirs...)) {
  return sizeof...(Ours) == sizeof...(Theirs) && ((sizeof(Ours) == sizeof(Theirs)) && ...);
}
static_assert(alike(decltype(Library::send){}, decltype(&ncclSend){}));
static_assert(alike(decltype(Library::receive){}, decltype(&ncclRecv){}));
static_assert(alike(decltype(Library::comm_register){}, decltype(&ncclCommRegister){}));
static_assert(alike(decltype(Library::comm_deregister){}, decltype(&ncclCommDeregister){}));
static_assert(alike(decltype(Library::all_to_all){}, decltype(&ncclAlltoAll){}));
static_assert(alike(decltype(Library::comm_init_all){}, decltype(&ncclCommInitAll){}));
#endif

const char* loopback() {
  static const std::string file = test::shared_library("loopback/libnccl.so.2").string();
  return file.c_str();
}

class NcclRing : public testing::Test {
 protected:
  void SetUp() override {
    auto opened = open_library(loopback());
    ASSERT_TRUE(opened.ok()) << opened.error().text;
    library_ = *opened;
    // The loopback's own questions are asked of the library itself.
    handle_ = dlopen(loopback(), RTLD_NOW | RTLD_LOCAL);
    ASSERT_NE(handle_, nullptr);
    ASSERT_TRUE(
        check(library_, library_.comm_init_all(communicators_.data(), 2, nullptr), "ncclCommInitAll").ok());
  }
  void TearDown() override {
    for (Communicator communicator : communicators_) library_.comm_destroy(communicator);
    dlclose(handle_);
  }
  [[nodiscard]] int registered() const {
    return reinterpret_cast<int (*)()>(dlsym(handle_, "loopback_nccl_registered"))();
  }
  void refuse_sends_after(int count) const {
    reinterpret_cast<void (*)(int)>(dlsym(handle_, "loopback_nccl_refuse_sends_after"))(count);
  }

  Library library_;
  void* handle_ = nullptr;
  std::array<Communicator, 2> communicators_{};
};

TEST_F(NcclRing, KnowsTheVersionAndWhatItLacks) {
  EXPECT_EQ(library_.version, 22809);
  EXPECT_NE(library_.comm_register, nullptr);
  EXPECT_EQ(library_.all_to_all, nullptr) << "the loopback is older than that call";
}

TEST(NcclLibrary, ThatIsNotThereIsAValue) {
  const auto opened = open_library("libterrace-no-such-nccl.so.2");
  ASSERT_FALSE(opened.ok());
  EXPECT_EQ(opened.error().code, Errc::kNotSupported);
  EXPECT_THAT(opened.error().text, testing::HasSubstr("no NCCL here"));
  EXPECT_EQ(open_library("libm.so.6").error().code, Errc::kNotSupported);
}

TEST_F(NcclRing, RingMemoryIsRegisteredForAsLongAsTheRegistrationLives) {
  std::array<std::unique_ptr<Device>, 2> devices;
  std::array<std::unique_ptr<HbmPool>, 2> pools;
  std::vector<RingBuffers::Member> members;
  for (int rank = 0; rank < 2; ++rank) {
    devices[rank] = std::move(open_emulated_device({.capacity = 16_MiB})).value();
    pools[rank] = std::move(HbmPool::create(*devices[rank], {.budget = 8_MiB})).value();
    members.push_back({.device = devices[rank].get(),
                       .pool = pools[rank].get(),
                       .stream = *devices[rank]->create_stream(StreamPriority::kNormal)});
  }
  RingOptions options;
  options.slots = 2;
  options.slot_bytes = 64_KiB;
  auto ring = std::move(RingBuffers::create(members, options)).value();
  {
    std::vector<Registration> held;
    for (std::uint32_t rank = 0; rank < 2; ++rank) {
      auto registration = Registration::create(library_, communicators_[rank], ring->rank(rank));
      ASSERT_TRUE(registration.ok()) << registration.error().text;
      held.push_back(std::move(registration).value());
    }
    EXPECT_EQ(registered(), 2);
    held.front() = std::move(held.back());
    EXPECT_EQ(registered(), 1);
  }
  EXPECT_EQ(registered(), 0);
  EXPECT_EQ(Registration::create(library_, communicators_[0], nullptr, 0_B).error().code, Errc::kIo);
  Library old = library_;
  old.comm_register = nullptr;
  EXPECT_EQ(Registration::create(old, communicators_[0], ring->rank(0)).error().code, Errc::kNotSupported);
  ring.reset();
  for (int rank = 0; rank < 2; ++rank) {
    pools[rank].reset();
    devices[rank]->destroy_stream(members[rank].stream);
  }
}

// Two ranks whose parts have other sizes each way, one of them empty.
struct Sides {
  Sides(const std::array<Communicator, 2>& communicators) {
    for (int rank = 0; rank < 2; ++rank) {
      for (std::size_t i = 0; i < send[rank].size(); ++i)
        send[rank][i] = static_cast<std::byte>(rank * 100 + static_cast<int>(i));
    }
    sides = {SendReceive{.communicator = communicators[0],
                         .send = send[0].data(),
                         .send_sizes = sizes[0],
                         .receive = receive[0].data(),
                         .receive_sizes = back[0]},
             SendReceive{.communicator = communicators[1],
                         .send = send[1].data(),
                         .send_sizes = sizes[1],
                         .receive = receive[1].data(),
                         .receive_sizes = back[1]}};
  }
  std::array<std::vector<Bytes>, 2> sizes{{{3_B, 5_B}, {0_B, 7_B}}};  // by sender
  std::array<std::vector<Bytes>, 2> back{{{3_B, 0_B}, {5_B, 7_B}}};   // by receiver
  std::array<std::array<std::byte, 16>, 2> send{};
  std::array<std::array<std::byte, 16>, 2> receive{};
  std::array<SendReceive, 2> sides;
};

TEST_F(NcclRing, TheFallbackMovesPackedPartsThroughGroupedSends) {
  Sides both(communicators_);
  const Status done = exchange_parts(library_, both.sides);
  ASSERT_TRUE(done.ok()) << done.error().text;
  EXPECT_EQ(std::memcmp(both.receive[0].data(), both.send[0].data(), 3), 0);
  EXPECT_EQ(std::memcmp(both.receive[1].data(), both.send[0].data() + 3, 5), 0);
  EXPECT_EQ(std::memcmp(both.receive[1].data() + 5, both.send[1].data(), 7), 0);
  EXPECT_EQ(both.receive[1][12], std::byte{0});
}

TEST_F(NcclRing, AnExchangeIsAnnouncedToBackgroundCopies) {
  const auto device = std::move(open_emulated_device({.capacity = 1_MiB})).value();
  const Stream stream = *device->create_stream(StreamPriority::kNormal);
  device->link_time().count_copier();
  {
    Collectives collectives(*device);
    Sides both(communicators_);
    both.sides[1].collectives = &collectives;
    both.sides[1].announced_on = stream;
    ASSERT_TRUE(exchange_parts(library_, both.sides).ok());
    ASSERT_TRUE(device->synchronize(stream).ok());
    const CollectiveLane& lane = device->link_time().seat().own().lanes[0];
    EXPECT_EQ(lane.begun, 1U);
    EXPECT_EQ(lane.ended, 1U);
  }
  device->link_time().discount_copier();
  device->destroy_stream(stream);
}

TEST_F(NcclRing, EveryRefusedSendEndsItsGroupAndIsAValue) {
  for (int sends = 0; sends < 3; ++sends) {
    Sides both(communicators_);
    refuse_sends_after(sends);
    const Status refused = exchange_parts(library_, both.sides);
    refuse_sends_after(-1);
    ASSERT_FALSE(refused.ok()) << "after " << sends;
    EXPECT_EQ(refused.error().code, Errc::kIo);
    EXPECT_THAT(refused.error().text, testing::HasSubstr("ncclSend: invalid usage"));
    EXPECT_TRUE(exchange_parts(library_, both.sides).ok()) << "no group was left open";
  }
}

TEST_F(NcclRing, SidesWithListsOfTwoLengthsAreRefused) {
  Sides both(communicators_);
  both.sides[1].receive_sizes = both.sides[1].receive_sizes.first(1);
  EXPECT_EQ(exchange_parts(library_, both.sides).error().code, Errc::kInvalidArgument);
}

}  // namespace
}  // namespace terrace::hooks::nccl
