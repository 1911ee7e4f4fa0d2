#include "runtime/wire.hpp"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstring>
#include <random>

#include "runtime/fault.hpp"

namespace terrace {
namespace {

using std::chrono::milliseconds;

struct Pair {
  Pair() {
    int fds[2] = {-1, -1};
    EXPECT_EQ(::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, fds), 0);
    one = WireConnection(OwnedFd(fds[0]));
    two = WireConnection(OwnedFd(fds[1]));
  }
  WireConnection one, two;
};

Hello some_hello() {
  Hello hello;
  hello.pid = 17;
  hello.job = WireText<64>("train");
  hello.device = WireText<32>("0000:1b:00.0");
  hello.run = 0xabc;
  hello.held = {1, 2, 3, 4};
  return hello;
}

std::vector<Message> one_of_each() {
  return {some_hello(),
          Welcome{},
          LeaseRequest{},
          Release{},
          LeaseGrant{},
          StatusRequest{},
          StatusReply{"{}"},
          Refusal{Errc::kProtocol, "why"},
          ShrinkRequest{1, 2, 3, 4},
          ShrinkReply{1, 0, 3, 4},
          Steer{Course::kPassthrough},
          SteerRequest{17, Course::kTiering},
          ReloadRequest{},
          Done{3}};
}

TEST(Wire, EveryMessageComesBackAsItWas) {
  ASSERT_EQ(one_of_each().size(), std::variant_size_v<Message>);
  for (const Message& message : one_of_each()) {
    const auto packet = encode(message, 77);
    const auto back = decode(packet);
    ASSERT_TRUE(back.ok()) << back.error().text;
    EXPECT_EQ(back->sequence, 77U);
    EXPECT_EQ(back->message.index(), message.index());
    EXPECT_EQ(encode(back->message, 77), packet);
  }
  const auto hello = decode(encode(some_hello(), 1));
  EXPECT_EQ(std::get<Hello>(hello->message).job.view(), "train");
}

TEST(Wire, TextIsCutToItsField) {
  EXPECT_EQ(WireText<8>("0123456789").view(), "0123456");
  const auto packet = encode(StatusReply{std::string(2 * kMaxWireText, 'x')}, 1);
  const auto back = decode(packet);
  ASSERT_TRUE(back.ok());
  EXPECT_EQ(std::get<StatusReply>(back->message).json.size(), kMaxWireText);
}

TEST(Wire, EveryCutAndEveryLongerPacketIsRefused) {
  for (const Message& message : one_of_each()) {
    auto packet = encode(message, 1);
    for (std::size_t size = 0; size < packet.size(); ++size) {
      EXPECT_FALSE(decode(std::span(packet).first(size)).ok()) << message.index() << " " << size;
    }
    packet.push_back(std::byte{0});
    EXPECT_FALSE(decode(packet).ok());
  }
}

TEST(Wire, ValuesOutOfRangeAreRefused) {
  EXPECT_FALSE(decode(encode(LeaseRequest{kTierCount, Unmet::kForget, 1}, 1)).ok());
  EXPECT_FALSE(decode(encode(LeaseRequest{0, static_cast<Unmet>(2), 1}, 1)).ok());
  EXPECT_FALSE(decode(encode(LeaseGrant{0, 2, 0, 0}, 1)).ok());
  EXPECT_FALSE(decode(encode(ShrinkReply{99, 0, 1, 1}, 1)).ok());
  EXPECT_FALSE(decode(encode(Steer{static_cast<Course>(2)}, 1)).ok());
  EXPECT_FALSE(decode(encode(SteerRequest{1, static_cast<Course>(9)}, 1)).ok());
  EXPECT_FALSE(decode(encode(Release{99, 0, 1}, 1)).ok());
  Hello hello = some_hello();
  hello.role = static_cast<Role>(7);
  EXPECT_FALSE(decode(encode(hello, 1)).ok());
  auto packet = encode(StatusRequest{}, 1);
  packet[4] = std::byte{9};  // the version
  const auto refused = decode(packet);
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.error().code, Errc::kProtocol);
  EXPECT_NE(refused.error().text.find("version 9"), std::string::npos) << refused.error().text;
}

TEST(Wire, RandomBytesNeverDoMoreThanBeRefused) {
  for (unsigned seed = 0; seed < 20; ++seed) {
    std::mt19937 random(seed);
    for (int round = 0; round < 500; ++round) {
      std::vector<std::byte> packet;
      if (round % 2 == 0) {  // a real message with some bytes changed
        const auto messages = one_of_each();
        packet = encode(messages[random() % messages.size()], random());
        for (unsigned i = random() % 4; i > 0; --i) packet[random() % packet.size()] = std::byte(random());
      } else {
        packet.resize(random() % 300);
        for (std::byte& byte : packet) byte = std::byte(random());
      }
      const auto decoded = decode(packet);
      if (decoded) {
        EXPECT_EQ(encode(decoded->message, decoded->sequence).size(), packet.size());
      } else {
        EXPECT_EQ(decoded.error().code, Errc::kProtocol);
      }
    }
  }
}

TEST(WireConnection, CarriesADescriptor) {
  Pair pair;
  int pipe_ends[2] = {-1, -1};
  ASSERT_EQ(::pipe2(pipe_ends, O_CLOEXEC), 0);
  const OwnedFd reading(pipe_ends[0]), writing(pipe_ends[1]);
  ASSERT_TRUE(pair.one.send(some_hello(), 5, writing.get()).ok());
  auto got = pair.two.receive(milliseconds(1000));
  ASSERT_TRUE(got.ok()) << got.error().text;
  EXPECT_EQ(got->sequence, 5U);
  ASSERT_TRUE(got->fd.valid());
  ASSERT_EQ(::write(got->fd.get(), "x", 1), 1);
  char c = 0;
  EXPECT_EQ(::read(reading.get(), &c, 1), 1);
}

TEST(WireConnection, SaysWhatHappened) {
  Pair pair;
  EXPECT_EQ(pair.two.receive(milliseconds(0)).error().code, Errc::kTimeout);
  const std::vector<char> long_one(kMaxWireText + 4096);
  ASSERT_GT(::send(pair.one.fd(), long_one.data(), long_one.size(), 0), 0);
  EXPECT_EQ(pair.two.receive(milliseconds(1000)).error().code, Errc::kProtocol);
  pair.one.close();
  EXPECT_EQ(pair.two.receive(milliseconds(1000)).error().code, Errc::kIo);
  EXPECT_EQ(pair.two.send(StatusRequest{}, 1).error().code, Errc::kIo);
}

TEST(WireConnection, AFullBufferIsAnErrorAndNotAWait) {
  Pair pair;
  Status sent;
  for (int i = 0; i < 100000 && sent.ok(); ++i) sent = pair.one.send(StatusReply{std::string(4096, 'x')}, 1);
  ASSERT_FALSE(sent.ok());
  EXPECT_EQ(sent.error().code, Errc::kIo);
}

TEST(WireConnection, NobodyThereIsNotFound) {
  EXPECT_EQ(WireConnection::connect("/nonexistent/terraced.sock").error().code, Errc::kNotFound);
  EXPECT_EQ(WireConnection::connect("/" + std::string(200, 'x')).error().code, Errc::kInvalidArgument);
  EXPECT_EQ(WireConnection::connect("").error().code, Errc::kInvalidArgument);
}

TEST(WireConnection, FaultsAreErrors) {
  Pair pair;
  {
    const ScopedFaults faults(fail_call(FaultPoint::kWireSend, 1));
    EXPECT_FALSE(pair.one.send(StatusRequest{}, 1).ok());
  }
  {
    const ScopedFaults faults(fail_call(FaultPoint::kWireReceive, 1));
    EXPECT_EQ(pair.two.receive(milliseconds(0)).error().code, Errc::kIo);
  }
  const ScopedFaults faults(fail_call(FaultPoint::kWireConnect, 1));
  EXPECT_EQ(WireConnection::connect("/nonexistent").error().code, Errc::kIo);
}

}  // namespace
}  // namespace terrace
