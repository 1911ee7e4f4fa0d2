// Where memory and devices are on this machine: NUMA nodes, the processing units beside them, and the node a
// device hangs on.
//
// Read once through hwloc into plain data, so that it can be kept, copied and asked without a lock. Indices
// are the operating system's. Only what this process may use is listed.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/result.hpp"

namespace terrace {

struct NumaNode {
  int index = 0;
  Bytes memory;  // installed there; zero where the system does not say
  std::vector<int> processing_units;
};

class Topology {
 public:
  // Errors of all three: kInvalidArgument (hwloc cannot read it), kNotFound (no NUMA node in it).
  [[nodiscard]] static Result<Topology> of_this_machine();
  // hwloc's synthetic form: "numa:2(memory=64GB) core:8 pu:2".
  [[nodiscard]] static Result<Topology> synthetic(const std::string& description);
  // A machine recorded with `lstopo --of xml`.
  [[nodiscard]] static Result<Topology> from_xml(const std::string& xml);

  // Those with memory, by index. Nodes that are a device's own memory are left out.
  [[nodiscard]] const std::vector<NumaNode>& nodes() const { return nodes_; }
  [[nodiscard]] int processing_units() const { return processing_units_; }
  // The node nearest to the device at a PCI address ("0000:1b:00.0", in either case), the first of several
  // that are equally near. Nothing where the device is not known, or hangs on no node more than on another.
  [[nodiscard]] std::optional<int> node_near(std::string_view pci) const;

 private:
  struct Source;
  Topology() = default;
  [[nodiscard]] static Result<Topology> read(const Source& source);

  std::vector<NumaNode> nodes_;
  std::map<std::string, int, std::less<>> node_by_pci_;  // addresses as hwloc writes them
  int processing_units_ = 0;
};

}  // namespace terrace
