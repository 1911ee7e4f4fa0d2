// The memory of the CUDA device: physical memory and where it is mapped, and pinned host memory.
#include "runtime/cuda/cuda_device.hpp"

#include "runtime/device_fault.hpp"

namespace terrace::cuda {

Status CudaDevice::check_size(const char* call, Bytes size) const {
  if (size > 0_B && size.count() % info_.granularity.count() == 0) return {};
  return invalid(std::string(call) + " of " + format_bytes(size) + ": sizes are multiples of " +
                     format_bytes(info_.granularity),
                 size);
}

Result<Address> CudaDevice::reserve(Bytes size) {
  if (auto fault = device_fault(FaultPoint::kDeviceReserve, size)) return *std::move(fault);
  if (Status checked = check_size("reserve", size); !checked.ok()) return checked.error();
  CUdeviceptr at = 0;
  const Status reserved = call("cuMemAddressReserve", size,
                               [&] { return driver_.cuMemAddressReserve(&at, size.count(), 0, 0, 0); });
  if (!reserved.ok()) return reserved.error();
  return reinterpret_cast<Address>(at);
}

void CudaDevice::release(Address address, Bytes size) {
  const CUresult freed =
      in_context([&] { return driver_.cuMemAddressFree(pointer_of(address), size.count()); });
  TERRACE_CHECK(freed != CUDA_ERROR_INVALID_VALUE, "release takes what reserve gave, unmapped before");
}

Result<Physical> CudaDevice::create(Bytes size, const CUmemAllocationProp& kind,
                                    std::optional<int> host_node) {
  PhysicalState state{.handle = 0, .size = size, .host_node = host_node};
  const Status created =
      call("cuMemCreate", size, [&] { return driver_.cuMemCreate(&state.handle, size.count(), &kind, 0); });
  if (!created.ok()) return created.error();
  const std::lock_guard lock(memory_mutex_);
  const Physical physical{.id = ++last_physical_};
  physical_.emplace(physical, state);
  return physical;
}

Result<Physical> CudaDevice::create_physical(Bytes size) {
  if (auto fault = device_fault(FaultPoint::kDeviceCreatePhysical, size)) return *std::move(fault);
  if (Status checked = check_size("create_physical", size); !checked.ok()) return checked.error();
  return create(size, memory_kind_, std::nullopt);
}

Result<Physical> CudaDevice::create_host_physical(Bytes size, int numa_node) {
  if (auto fault = device_fault(FaultPoint::kDeviceCreatePhysical, size)) return *std::move(fault);
  if (Status checked = check_size("create_host_physical", size); !checked.ok()) return checked.error();
  const std::string node = " on NUMA node " + std::to_string(numa_node);
  if (!info_.can.host_physical) {
    return Error{.code = Errc::kNotSupported,
                 .text = "cuda device " + std::to_string(info_.id.index) + " cannot map host memory" + node +
                         ": its driver lacks host NUMA memory management",
                 .bytes = size};
  }
  CUmemAllocationProp kind{};
  kind.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  kind.location = {.type = CU_MEM_LOCATION_TYPE_HOST_NUMA, .id = numa_node};
  auto created = create(size, kind, numa_node);
  if (created.ok()) return created;
  Error error = std::move(created).error();
  error.text += node;
  // Some machines announce host NUMA memory and refuse every node, or some; out of memory is another matter.
  if (error.code == Errc::kInvalidArgument || error.code == Errc::kNotFound) error.code = Errc::kNotSupported;
  return error;
}

void CudaDevice::destroy_physical(Physical physical) {
  PhysicalState state;
  {
    const std::lock_guard lock(memory_mutex_);
    const auto found = physical_.find(physical);
    TERRACE_CHECK(found != physical_.end(), "physical memory is destroyed once");
    state = found->second;
    physical_.erase(found);
  }
  (void)in_context([&] { return driver_.cuMemRelease(state.handle); });
}

Status CudaDevice::map(Address at, Physical physical, Bytes size) {
  if (auto fault = device_fault(FaultPoint::kDeviceMap, size)) return *std::move(fault);
  if (Status checked = check_size("map", size); !checked.ok()) return checked;
  const std::lock_guard lock(memory_mutex_);
  const auto found = physical_.find(physical);
  if (found == physical_.end()) return invalid("map: no such physical memory", size);
  const PhysicalState state = found->second;
  if (state.size != size) {
    return invalid("map of " + format_bytes(size) + ": physical memory is mapped whole, here " +
                       format_bytes(state.size),
                   size);
  }
  const CUdeviceptr pointer = pointer_of(at);
  Status mapped =
      call("cuMemMap", size, [&] { return driver_.cuMemMap(pointer, size.count(), 0, state.handle, 0); });
  if (!mapped.ok()) return mapped;
  const Mapping mapping{.size = size, .host_node = state.host_node};
  Status granted = open_access(at, mapping);
  if (granted.ok()) {
    mappings_.insert_or_assign(at, mapping);
  } else {
    (void)in_context([&] { return driver_.cuMemUnmap(pointer, size.count()); });
  }
  return granted;
}

Status CudaDevice::map_all(Address at, std::span<const PhysicalPiece> pieces) {
  const Bytes whole = whole_size(pieces);
  if (auto fault = device_fault(FaultPoint::kDeviceMap, whole)) return *std::move(fault);
  if (pieces.empty()) return {};
  const std::lock_guard lock(memory_mutex_);
  Bytes done;
  Status status;
  std::size_t mapped = 0;
  for (; mapped < pieces.size(); ++mapped) {
    const PhysicalPiece& piece = pieces[mapped];
    status = map_piece(at + done.count(), piece);
    if (!status.ok()) break;
    done += piece.size;
  }
  if (status.ok()) status = open_access(at, {.size = whole, .host_node = std::nullopt});
  Address piece_at = at;
  for (const PhysicalPiece& piece : pieces.first(mapped)) {
    if (status.ok()) {
      mappings_.insert_or_assign(piece_at, Mapping{.size = piece.size, .host_node = std::nullopt});
    } else {
      Status undone = call("cuMemUnmap", piece.size,
                           [&] { return driver_.cuMemUnmap(pointer_of(piece_at), piece.size.count()); });
      if (!undone.ok()) {
        // Half of it is mapped and stays so: nothing on this device can be relied on any more.
        Error lost = undone.error();
        lost.code = Errc::kDeviceLost;
        return lost;
      }
    }
    piece_at += piece.size.count();
  }
  return status;
}

// Without access yet; memory_mutex_ held.
Status CudaDevice::map_piece(Address at, const PhysicalPiece& piece) const {
  const auto found = physical_.find(piece.physical);
  if (found == physical_.end() || found->second.size != piece.size || found->second.host_node) {
    return invalid("map_all: a piece is no device memory of " + format_bytes(piece.size), piece.size);
  }
  return call("cuMemMap", piece.size, [&] {
    return driver_.cuMemMap(pointer_of(at), piece.size.count(), 0, found->second.handle, 0);
  });
}

Status CudaDevice::open_access(Address at, const Mapping& mapping) const {
  std::vector<CUmemAccessDesc> who = access_;
  if (mapping.host_node) {
    who.push_back({.location = {.type = CU_MEM_LOCATION_TYPE_HOST_NUMA, .id = *mapping.host_node},
                   .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE});
  }
  return call("cuMemSetAccess", mapping.size, [&] {
    return driver_.cuMemSetAccess(pointer_of(at), mapping.size.count(), who.data(), who.size());
  });
}

Status CudaDevice::unmap(Address at, Bytes size) {
  if (auto fault = device_fault(FaultPoint::kDeviceUnmap, size)) return *std::move(fault);
  if (Status checked = check_size("unmap", size); !checked.ok()) return checked;
  const std::lock_guard lock(memory_mutex_);
  Status unmapped =
      call("cuMemUnmap", size, [&] { return driver_.cuMemUnmap(pointer_of(at), size.count()); });
  if (unmapped.ok()) mappings_.erase(mappings_.lower_bound(at), mappings_.lower_bound(at + size.count()));
  return unmapped;
}

Status CudaDevice::grant_access_to(const Device& peer) {
  if (peer.info().kind != info_.kind || peer.info().id == info_.id) {
    return peer.info().id == info_.id && peer.info().kind == info_.kind
               ? Status{}
               : Status(Error{
                     .code = Errc::kNotSupported,
                     .text = "a cuda device and an " + peer.info().kind + " one reach no common memory"});
  }
  const CUdevice other = static_cast<const CudaDevice&>(peer).device_;
  int reaches = 0;
  Status asked = call("cuDeviceCanAccessPeer", {},
                      [&] { return driver_.cuDeviceCanAccessPeer(&reaches, other, device_); });
  if (!asked.ok()) return asked;
  if (reaches == 0) {
    return Error{.code = Errc::kNotSupported,
                 .text = "cuda device " + std::to_string(peer.info().id.index) +
                         " cannot reach the memory of device " + std::to_string(info_.id.index)};
  }
  const std::lock_guard lock(memory_mutex_);
  const CUmemLocation location{.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = other};
  for (const CUmemAccessDesc& known : access_) {
    if (known.location.type == location.type && known.location.id == location.id) return {};
  }
  access_.push_back({.location = location, .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE});
  for (const auto& [at, mapping] : mappings_) {
    if (Status opened = open_access(at, mapping); !opened.ok()) {
      // What was opened already stays open: harmless, and closed with its mapping.
      access_.pop_back();
      return opened;
    }
  }
  return {};
}

Result<MemoryInfo> CudaDevice::memory() const {
  std::size_t free = 0;
  std::size_t total = 0;
  const Status asked = call("cuMemGetInfo", {}, [&] { return driver_.cuMemGetInfo(&free, &total); });
  if (!asked.ok()) return asked.error();
  return MemoryInfo{.free = Bytes(free), .total = Bytes(total)};
}

Status CudaDevice::pin(Address host, Bytes size) {
  if (auto fault = device_fault(FaultPoint::kDevicePin, size)) return *std::move(fault);
  if (host == nullptr || size == 0_B) return invalid("pin of nothing", size);
  // Portable: pinned for every context of the process, since one buffer may serve several devices.
  Status pinned = call("cuMemHostRegister", size, [&] {
    return driver_.cuMemHostRegister(host, size.count(), CU_MEMHOSTREGISTER_PORTABLE);
  });
  if (!pinned.ok()) return pinned;
  const std::lock_guard lock(memory_mutex_);
  pinned_.emplace(host, size);
  return {};
}

void CudaDevice::unpin(Address host, Bytes size) {
  {
    const std::lock_guard lock(memory_mutex_);
    const auto range = pinned_.find(host);
    TERRACE_CHECK(range != pinned_.end() && range->second == size, "unpin takes what was pinned");
    pinned_.erase(range);
  }
  (void)in_context([&] { return driver_.cuMemHostUnregister(host); });
}

}  // namespace terrace::cuda
