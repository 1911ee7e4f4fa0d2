// Copies between layouts: any slicing, joining or transposing of rows is a gather of pieces of one width.
//
// A map says for each piece of the output which piece of the input it is; it lives on the device and is
// shared by all layers that lay out their rows alike.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "examples/moe_trainer/model/pass.hpp"

namespace terrace::trainer {

class RowMap {
 public:
  using Source = std::function<std::int64_t(std::int64_t piece)>;
  // Piece i of the output is piece source(i) of the input. Throws std::invalid_argument where a place is
  // beyond 32 bits.
  RowMap(std::int64_t pieces, const Source& source);
  // Uploads; once, before the first pass. Throws OutOfMemory.
  void allocate(Session& session, Memory& memory);

  // Writes all of `out` from x. Precondition: a piece is a whole number of floats' bytes.
  void gather(const Pass& pass, const Tensor& x, const Tensor& out) const;
  // Writes `out`: each row the sum of its share of the rows gathered from x, in their order; `order` counts
  // those rows, 0, 1, 2 ...
  void gather_sums(const Pass& pass, const Tensor& x, const RowMap& order, const Tensor& out) const;
  // The places themselves, on the device.
  [[nodiscard]] const std::int32_t* places() const { return device_.as<const std::int32_t>(); }

 private:
  std::vector<std::int32_t> host_;  // until allocate()
  std::int64_t pieces_;
  Tensor device_;
};

// A model's maps by what they do; layers of one shape ask for the same.
class RowMaps {
 public:
  [[nodiscard]] const RowMap& get(const std::string& name, std::int64_t pieces, const RowMap::Source& source);
  void allocate(Session& session, Memory& memory);

 private:
  std::map<std::string, RowMap> maps_;
};

}  // namespace terrace::trainer
