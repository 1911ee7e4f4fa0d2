#include "runtime/topology.hpp"

#include <hwloc.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstring>
#include <memory>

namespace terrace {

// What hwloc is to read instead of this machine; both null: this machine.
struct Topology::Source {
  const char* synthetic = nullptr;
  const std::string* xml = nullptr;
};

namespace {

struct DestroyTopology {
  void operator()(hwloc_topology* topology) const { hwloc_topology_destroy(topology); }
};
using OwnedTopology = std::unique_ptr<hwloc_topology, DestroyTopology>;

struct PciAddress {
  unsigned domain = 0;
  unsigned bus = 0;
  unsigned device = 0;
  unsigned function = 0;
};

std::string write(const PciAddress& address) {
  std::array<char, 48> text{};
  std::snprintf(text.data(), text.size(), "%04x:%02x:%02x.%x", address.domain, address.bus, address.device,
                address.function);
  return text.data();
}

std::vector<int> indices_of(hwloc_const_bitmap_t set) {
  std::vector<int> indices;
  for (int index = hwloc_bitmap_first(set); index >= 0; index = hwloc_bitmap_next(set, index)) {
    indices.push_back(index);
  }
  return indices;
}

// Memory of a GPU that the system shows as a node of its own is HBM, not DDR.
bool is_device_memory(const hwloc_obj* node) {
  return node->subtype != nullptr && std::strcmp(node->subtype, "GPUMemory") == 0;
}

std::vector<NumaNode> read_nodes(hwloc_topology* topology) {
  std::vector<NumaNode> nodes;
  for (hwloc_obj_t node = nullptr;
       (node = hwloc_get_next_obj_by_type(topology, HWLOC_OBJ_NUMANODE, node)) != nullptr;) {
    if (is_device_memory(node)) continue;
    nodes.push_back({.index = static_cast<int>(node->os_index),
                     .memory = Bytes(node->attr->numanode.local_memory),
                     .processing_units = indices_of(node->cpuset)});
  }
  const auto has_memory = [](const NumaNode& node) { return node.memory > 0_B; };
  // A system that says of no node how much memory it has still has memory.
  if (std::any_of(nodes.begin(), nodes.end(), has_memory)) {
    std::erase_if(nodes, [&](const NumaNode& node) { return !has_memory(node); });
  }
  std::sort(nodes.begin(), nodes.end(),
            [](const NumaNode& a, const NumaNode& b) { return a.index < b.index; });
  return nodes;
}

// The first node under the smallest part of the machine that holds both the device and a node with memory.
std::optional<int> nearest(hwloc_topology* topology, hwloc_obj_t device, const std::vector<NumaNode>& nodes) {
  for (hwloc_obj_t part = hwloc_get_non_io_ancestor_obj(topology, device); part != nullptr;
       part = part->parent) {
    std::vector<int> under;
    for (const NumaNode& node : nodes) {
      if (hwloc_bitmap_isset(part->nodeset, static_cast<unsigned>(node.index)) != 0)
        under.push_back(node.index);
    }
    if (under.empty()) continue;
    if (under.size() == nodes.size() && nodes.size() > 1) return std::nullopt;
    return under.front();
  }
  return std::nullopt;
}

}  // namespace

Result<Topology> Topology::read(const Source& source) {
  const auto refused = [](const char* step) {
    return Error{.code = Errc::kInvalidArgument, .text = std::string("topology: hwloc cannot ") + step};
  };
  hwloc_topology_t raw = nullptr;
  if (hwloc_topology_init(&raw) != 0) return refused("start");
  const OwnedTopology topology(raw);
  if (source.synthetic != nullptr && hwloc_topology_set_synthetic(raw, source.synthetic) != 0) {
    return refused("read the synthetic description");
  }
  if (source.xml != nullptr &&
      hwloc_topology_set_xmlbuffer(raw, source.xml->c_str(), static_cast<int>(source.xml->size()) + 1) != 0) {
    return refused("read the XML");
  }
  hwloc_topology_set_io_types_filter(raw, HWLOC_TYPE_FILTER_KEEP_IMPORTANT);
  if (hwloc_topology_load(raw) != 0) return refused("load the topology");

  Topology read;
  read.nodes_ = read_nodes(raw);
  if (read.nodes_.empty()) return Error{.code = Errc::kNotFound, .text = "topology: no NUMA node"};
  read.processing_units_ = hwloc_get_nbobjs_by_type(raw, HWLOC_OBJ_PU);
  for (hwloc_obj_t device = nullptr; (device = hwloc_get_next_pcidev(raw, device)) != nullptr;) {
    const auto& pci = device->attr->pcidev;
    if (const std::optional<int> node = nearest(raw, device, read.nodes_)) {
      read.node_by_pci_.emplace(write({pci.domain, pci.bus, pci.dev, pci.func}), *node);
    }
  }
  return read;
}

Result<Topology> Topology::of_this_machine() { return read({}); }

Result<Topology> Topology::synthetic(const std::string& description) {
  return read({.synthetic = description.c_str(), .xml = nullptr});
}

Result<Topology> Topology::from_xml(const std::string& xml) {
  return read({.synthetic = nullptr, .xml = &xml});
}

std::optional<int> Topology::node_near(std::string_view pci) const {
  const std::string text(pci);
  PciAddress address;
  int used = 0;
  if (std::sscanf(text.c_str(), "%x:%x:%x.%x%n", &address.domain, &address.bus, &address.device,
                  &address.function, &used) != 4 ||
      used != static_cast<int>(text.size())) {
    return std::nullopt;
  }
  const auto found = node_by_pci_.find(write(address));
  if (found == node_by_pci_.end()) return std::nullopt;
  return found->second;
}

}  // namespace terrace
