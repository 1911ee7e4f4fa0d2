#include "runtime/topology.hpp"

#include <gtest/gtest.h>

#include <set>
#include <string>

namespace terrace {
namespace {

class SyntheticTopology : public testing::TestWithParam<int> {};

TEST_P(SyntheticTopology, NodesShareOutTheProcessingUnits) {
  const int count = GetParam();
  const auto topology =
      Topology::synthetic("numa:" + std::to_string(count) + "(memory=68719476736) core:4 pu:2");
  ASSERT_TRUE(topology.ok()) << topology.error().text;
  ASSERT_EQ(topology->nodes().size(), static_cast<std::size_t>(count));
  EXPECT_EQ(topology->processing_units(), count * 8);
  std::set<int> units;
  for (int index = 0; index < count; ++index) {
    const NumaNode& node = topology->nodes()[static_cast<std::size_t>(index)];
    EXPECT_EQ(node.index, index);
    EXPECT_EQ(node.memory, 64_GiB);
    EXPECT_EQ(node.processing_units.size(), 8U);
    units.insert(node.processing_units.begin(), node.processing_units.end());
  }
  EXPECT_EQ(units.size(), static_cast<std::size_t>(count * 8)) << "no unit belongs to two nodes";
  EXPECT_FALSE(topology->node_near("0000:1b:00.0").has_value()) << "no such device";
}

INSTANTIATE_TEST_SUITE_P(Machines, SyntheticTopology, testing::Values(1, 2, 8));

// Two packages of a node with two units each, and a GPU on what the caller says: as `lstopo --of xml` writes
// it.
std::string machine_with_gpu(int gpu_package) {
  const std::string gpu = R"(
      <object type="Bridge" gp_index="50" bridge_type="0-1" depth="0" bridge_pci="0000:[00-7f]">
        <object type="PCIDev" gp_index="51" pci_busid="0000:1b:00.0" pci_type="0302 [10de:2335] [10de:18be] a1"
                pci_link_speed="63.0"/>
      </object>)";
  std::string xml = R"(<?xml version="1.0" encoding="UTF-8"?>
<!DOCTYPE topology SYSTEM "hwloc2.dtd">
<topology version="2.0">
  <object type="Machine" os_index="0" cpuset="0xf" complete_cpuset="0xf" allowed_cpuset="0xf" nodeset="0x3"
          complete_nodeset="0x3" allowed_nodeset="0x3" gp_index="1">)";
  for (int package = 0; package < 2; ++package) {
    const std::string cpus = package == 0 ? "0x3" : "0xc";
    const std::string nodes = package == 0 ? "0x1" : "0x2";
    const std::string sets = " cpuset=\"" + cpus + "\" complete_cpuset=\"" + cpus + "\" nodeset=\"" + nodes +
                             "\" complete_nodeset=\"" + nodes + "\"";
    const std::string index = std::to_string(package);
    xml += "<object type=\"Package\" os_index=\"" + index + "\"" + sets + " gp_index=\"1" + index + "\">";
    xml += "<object type=\"NUMANode\" os_index=\"" + index + "\"" + sets + " gp_index=\"2" + index +
           "\" local_memory=\"68719476736\"/>";
    for (int unit = 2 * package; unit < 2 * package + 2; ++unit) {
      const std::string mask = std::to_string(1 << unit);
      const std::string own = " cpuset=\"0x" + mask + "\" complete_cpuset=\"0x" + mask + "\" nodeset=\"" +
                              nodes + "\" complete_nodeset=\"" + nodes + "\"";
      const std::string name = std::to_string(unit);
      xml += "<object type=\"PU\" os_index=\"" + name + "\"" + own + " gp_index=\"3" + name + "\"/>";
    }
    if (package == gpu_package) xml += gpu;
    xml += "</object>";
  }
  if (gpu_package < 0) xml += gpu;
  return xml + "</object></topology>";
}

TEST(Topology, AGpuIsNearestToTheNodeItHangsOn) {
  for (int package = 0; package < 2; ++package) {
    const auto topology = Topology::from_xml(machine_with_gpu(package));
    ASSERT_TRUE(topology.ok()) << topology.error().text;
    ASSERT_EQ(topology->nodes().size(), 2U);
    EXPECT_EQ(topology->node_near("0000:1b:00.0"), package);
    EXPECT_EQ(topology->node_near("00000000:1B:00.0"), package) << "the same address, written otherwise";
    EXPECT_FALSE(topology->node_near("0000:1c:00.0").has_value());
    EXPECT_FALSE(topology->node_near("0000:1b:00.0 and more").has_value());
    EXPECT_FALSE(topology->node_near("").has_value());
  }
}

TEST(Topology, AGpuBesideNoNodeInParticularHasNoNearest) {
  const auto topology = Topology::from_xml(machine_with_gpu(-1));
  ASSERT_TRUE(topology.ok()) << topology.error().text;
  EXPECT_FALSE(topology->node_near("0000:1b:00.0").has_value());
}

TEST(Topology, RefusesWhatItCannotRead) {
  const auto nonsense = Topology::synthetic("three cups of tea");
  ASSERT_FALSE(nonsense.ok());
  EXPECT_EQ(nonsense.error().code, Errc::kInvalidArgument);
  EXPECT_FALSE(Topology::from_xml("<topology").ok());
}

TEST(Topology, ThisMachineHasANodeAndAUnit) {
  const auto topology = Topology::of_this_machine();
  ASSERT_TRUE(topology.ok()) << topology.error().text;
  EXPECT_GE(topology->nodes().size(), 1U);
  EXPECT_GE(topology->processing_units(), 1);
}

}  // namespace
}  // namespace terrace
