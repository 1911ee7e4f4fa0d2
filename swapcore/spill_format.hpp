// What an output is on its way to DDR and there: its own bytes, or fewer that come near to it.
//
// An output packed as 8-bit floats (runtime/fp8_blocks.hpp) is packed on the compute stream when it is
// offered, and unpacked there when it is asked for: so what the residency store holds and moves is a block
// like any other. Called from one thread.
#pragma once

#include <map>
#include <optional>

#include "allocator/ddr_pool.hpp"
#include "allocator/hbm_pool.hpp"
#include "runtime/fp8_blocks.hpp"
#include "swapcore/policy/policy.hpp"
#include "swapcore/residency.hpp"

namespace terrace {

// The bytes that travel of an output of that size. At most the size: where packing does not pay, or nobody
// said what the numbers are, an output travels as it is.
[[nodiscard]] Bytes travel_bytes(SpillFormat format, Bytes size, Element element);

class SpillPacker {
 public:
  struct Parts {
    Device& device;
    HbmPool& hbm;
    DdrPool& ddr;
    Stream compute;
  };
  // Takes a few bytes of either pool for what it measures; without them it measures nothing.
  explicit SpillPacker(const Parts& parts);
  ~SpillPacker();
  SpillPacker(const SpillPacker&) = delete;
  SpillPacker& operator=(const SpillPacker&) = delete;

  // The output in packed form, in a block that `wrap` makes of one of the pool's. Errors: kOutOfBudget (HBM),
  // what the device said.
  [[nodiscard]] Result<BlockRef> pack(const EntryKey& key, const Block& output, Element element,
                                      const std::function<BlockRef(const Block&)>& wrap);
  // The size of the output that the entry is the packed form of; nothing: it is the output itself.
  [[nodiscard]] std::optional<Bytes> unpacked_size(const EntryKey& key) const;
  // Fills `output`, of that size; the entry is forgotten. Errors: what the device said.
  [[nodiscard]] Status unpack(const EntryKey& key, const Block& packed, const Block& output);
  void forget_all();

  // A step has ended: asks the device how far off the numbers are that were packed so far.
  void ask_for_error();
  struct Error {
    double largest = 0;  // of a number, as a share of the largest in its block
    double mean = 0;     // of |x - what comes back|, as a share of the mean |x|
  };
  // Of all that was packed until the last ask_for_error() whose answer is there. Also sets the metrics.
  [[nodiscard]] Error error();

 private:
  struct Packed {
    Element element;
    Bytes size;
  };
  void forget_error();

  const Parts parts_;
  std::map<EntryKey, Packed> packed_;
  std::optional<Block> sums_, answer_;  // an Fp8Error each, in HBM and in DDR
  std::optional<Event> answered_;
  bool packed_since_ = false, asked_ = false;
  Error error_;
};

}  // namespace terrace
