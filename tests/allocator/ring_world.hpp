// Ranks with devices, pools, streams and buffers, for tests of the ring buffers on any device.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "allocator/hbm_pool.hpp"
#include "allocator/ring/ring_buffers.hpp"

namespace terrace {

inline void expect_ok(const Status& status) { EXPECT_TRUE(status.ok()) << status.error().text; }

// Device memory of a pool that the host fills and reads by copies.
class RingBuffer {
 public:
  RingBuffer(Device& device, HbmPool& pool, Stream stream, Bytes size)
      : device_(device), pool_(pool), stream_(stream), block_(*pool.allocate(stream, size, Pool::kScratch)) {}
  ~RingBuffer() {
    expect_ok(device_.synchronize(stream_));
    expect_ok(pool_.free_completed(block_));
  }
  RingBuffer(const RingBuffer&) = delete;
  RingBuffer& operator=(const RingBuffer&) = delete;

  [[nodiscard]] Address data() const { return block_.address; }
  [[nodiscard]] Bytes size() const { return block_.size; }
  [[nodiscard]] std::uint64_t* counts() const { return reinterpret_cast<std::uint64_t*>(block_.address); }
  void write(const void* from, std::uint64_t size) {
    expect_ok(device_.copy(stream_, Direction::kH2D, block_.address, static_cast<const std::byte*>(from),
                           Bytes(size)));
    expect_ok(device_.synchronize(stream_));
  }
  [[nodiscard]] std::vector<std::byte> read(const std::byte* from, std::uint64_t size) {
    std::vector<std::byte> bytes(size);
    expect_ok(device_.copy(stream_, Direction::kD2H, bytes.data(), from, Bytes(size)));
    expect_ok(device_.synchronize(stream_));
    return bytes;
  }
  [[nodiscard]] std::vector<std::uint64_t> read_counts(std::uint32_t ranks) {
    const std::vector<std::byte> bytes = read(block_.address, ranks * sizeof(std::uint64_t));
    std::vector<std::uint64_t> counts(ranks);
    std::memcpy(counts.data(), bytes.data(), bytes.size());
    return counts;
  }

 private:
  Device& device_;
  HbmPool& pool_;
  Stream stream_;
  Block block_;
};

// Where each rank lives. Ranks may share a device.
struct RingWorldOptions {
  Bytes budget = Bytes(64ULL << 20);  // of each pool
  Bytes buffer = Bytes(1ULL << 20);   // send and receive buffers
};

class RingWorld {
 public:
  // `devices[i]` serves rank i.
  RingWorld(std::vector<Device*> devices, const RingWorldOptions& options) : devices_(std::move(devices)) {
    const auto ranks = static_cast<std::uint32_t>(devices_.size());
    for (std::uint32_t rank = 0; rank < ranks; ++rank) {
      Device& device = *devices_[rank];
      streams_.push_back(*device.create_stream(StreamPriority::kNormal));
      pools_.push_back(std::move(HbmPool::create(device, {.budget = options.budget})).value());
      const auto make = [&](Bytes size) {
        return std::make_unique<RingBuffer>(device, *pools_[rank], streams_[rank], size);
      };
      send_.push_back(make(options.buffer));
      receive_.push_back(make(options.buffer));
      counts_.push_back(make(Bytes(ranks * sizeof(std::uint64_t))));
      arrived_.push_back(make(Bytes(ranks * sizeof(std::uint64_t))));
    }
  }
  ~RingWorld() {
    ring_.reset();
    send_.clear();
    receive_.clear();
    counts_.clear();
    arrived_.clear();
    pools_.clear();
    for (std::size_t rank = 0; rank < devices_.size(); ++rank) devices_[rank]->destroy_stream(streams_[rank]);
  }
  RingWorld(const RingWorld&) = delete;
  RingWorld& operator=(const RingWorld&) = delete;

  [[nodiscard]] std::uint32_t ranks() const { return static_cast<std::uint32_t>(devices_.size()); }
  [[nodiscard]] Device& device(std::uint32_t rank) { return *devices_[rank]; }
  [[nodiscard]] HbmPool& pool(std::uint32_t rank) { return *pools_[rank]; }
  [[nodiscard]] Stream stream(std::uint32_t rank) const { return streams_[rank]; }
  [[nodiscard]] RingBuffer& send(std::uint32_t rank) { return *send_[rank]; }
  [[nodiscard]] RingBuffer& receive(std::uint32_t rank) { return *receive_[rank]; }
  [[nodiscard]] RingBuffer& arrived(std::uint32_t rank) { return *arrived_[rank]; }
  [[nodiscard]] RingRank& ring(std::uint32_t rank) { return ring_->rank(rank); }

  [[nodiscard]] std::vector<RingBuffers::Member> members() {
    std::vector<RingBuffers::Member> members;
    for (std::uint32_t rank = 0; rank < ranks(); ++rank)
      members.push_back({.device = devices_[rank], .pool = pools_[rank].get(), .stream = streams_[rank]});
    return members;
  }
  [[nodiscard]] Status make_ring(const RingOptions& options) {
    auto made = RingBuffers::create(members(), options);
    if (!made.ok()) return made.error();
    ring_ = std::move(made).value();
    return {};
  }
  void drop_ring() { ring_.reset(); }

  [[nodiscard]] RingParts parts(std::uint32_t rank) {
    return {.data = send(rank).data(), .size = send(rank).size(), .counts = counts_[rank]->counts()};
  }
  [[nodiscard]] RingRoom room(std::uint32_t rank) {
    return {.data = receive(rank).data(), .size = receive(rank).size(), .counts = arrived(rank).counts()};
  }

  static std::byte content(std::uint32_t sender, std::uint32_t receiver, std::uint64_t round,
                           std::uint64_t at) {
    return static_cast<std::byte>((sender * 7 + receiver * 31 + round * 101 + at * 13 + (at >> 9)) & 0xFF);
  }
  // counts[sender][receiver] bytes, and what is in them.
  void fill(const std::vector<std::vector<std::uint64_t>>& counts, std::uint64_t round) {
    sizes_ = counts;
    round_ = round;
    for (std::uint32_t rank = 0; rank < ranks(); ++rank) {
      std::vector<std::byte> packed;
      for (std::uint32_t peer = 0; peer < ranks(); ++peer) {
        for (std::uint64_t i = 0; i < counts[rank][peer]; ++i)
          packed.push_back(content(rank, peer, round, i));
      }
      if (!packed.empty()) send(rank).write(packed.data(), packed.size());
      counts_[rank]->write(counts[rank].data(), counts[rank].size() * sizeof(std::uint64_t));
    }
  }
  void fill_random(std::mt19937_64& random, std::uint64_t most, std::uint64_t round) {
    std::vector<std::vector<std::uint64_t>> counts(ranks(), std::vector<std::uint64_t>(ranks()));
    for (auto& row : counts) {
      for (std::uint64_t& count : row) {
        count = random() % 4 == 0 ? 0 : random() % (most + 1);
        if (random() % 2 == 0) count = count / 16 * 16;
      }
    }
    fill(counts, round);
  }
  void fill_equal(std::uint64_t each, std::uint64_t round) {
    fill(std::vector(ranks(), std::vector<std::uint64_t>(ranks(), each)), round);
  }

  void expect_part(const std::vector<std::byte>& bytes, std::uint32_t sender, std::uint32_t receiver) {
    for (std::uint64_t i = 0; i < bytes.size(); ++i) {
      ASSERT_EQ(bytes[i], content(sender, receiver, round_, i))
          << "byte " << i << " of " << bytes.size() << " from rank " << sender << " to " << receiver;
    }
  }
  // The parts of all, next to each other in `receiver`'s buffer.
  void expect_received(std::uint32_t receiver) {
    const std::byte* at = receive(receiver).data();
    for (std::uint32_t sender = 0; sender < ranks(); ++sender) {
      const std::uint64_t size = sizes_[sender][receiver];
      if (size > 0) expect_part(receive(receiver).read(at, size), sender, receiver);
      at += size;
    }
  }
  [[nodiscard]] std::uint64_t size_of(std::uint32_t sender, std::uint32_t receiver) const {
    return sizes_[sender][receiver];
  }
  void expect_counts(std::uint32_t receiver) {
    const std::vector<std::uint64_t> counts = arrived(receiver).read_counts(ranks());
    for (std::uint32_t sender = 0; sender < ranks(); ++sender)
      EXPECT_EQ(counts[sender], size_of(sender, receiver));
  }
  // Every rank has been told to; wait, and nobody complains.
  void finish() {
    for (std::uint32_t rank = 0; rank < ranks(); ++rank) expect_ok(device(rank).synchronize(stream(rank)));
    for (std::uint32_t rank = 0; rank < ranks(); ++rank) expect_ok(ring(rank).check());
  }

 private:
  std::vector<Device*> devices_;
  std::vector<Stream> streams_;
  std::vector<std::unique_ptr<HbmPool>> pools_;
  std::vector<std::unique_ptr<RingBuffer>> send_;
  std::vector<std::unique_ptr<RingBuffer>> receive_;
  std::vector<std::unique_ptr<RingBuffer>> counts_;
  std::vector<std::unique_ptr<RingBuffer>> arrived_;
  std::unique_ptr<RingBuffers> ring_;
  std::vector<std::vector<std::uint64_t>> sizes_;
  std::uint64_t round_ = 0;
};

}  // namespace terrace
