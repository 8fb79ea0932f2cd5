// Domains and memory of the fake provider.
#include <sys/mman.h>
#include <sys/stat.h>

#include <cerrno>

#include "tests/cpp/support/check.h"
#include "tests/cpp/transport/verbs/fake/verbs_fake_network.h"

namespace pycoll::testing {
namespace {

constexpr std::uint64_t kPage = 4096;

// Requires: the network's lock.
FakeRegion* make_region(ibv_pd* domain, void* address, std::size_t bytes, int access) {
  net().registered_bytes += bytes;
  ++net().handles;
  auto* made = new FakeRegion;
  made->handle.context = domain->context;
  made->handle.pd = domain;
  made->handle.addr = address;
  made->handle.length = bytes;
  made->handle.lkey = net().next_number++;
  made->handle.rkey = net().next_number++;
  made->access = access;
  net().regions[made->handle.lkey] = made;
  net().regions[made->handle.rkey] = made;
  return made;
}

// The pages of the dma-buf that hold these bytes, as the card has them.
void map(FakeRegion& region, int descriptor, std::uint64_t offset) {
  const std::uint64_t in_page = offset % kPage;
  region.mapping_bytes = region.handle.length + in_page;
  region.mapping = ::mmap(nullptr, region.mapping_bytes, PROT_READ | PROT_WRITE, MAP_SHARED,
                          descriptor, static_cast<off_t>(offset - in_page));
  CHECK(region.mapping != MAP_FAILED, "%zu bytes cannot be mapped", region.mapping_bytes);
  region.mapped = static_cast<std::byte*>(region.mapping) + in_page;
}

}  // namespace

ibv_pd* alloc_pd(ibv_context* context) {
  const auto held = net().lock();
  ++net().handles;
  auto* made = new ibv_pd{};
  made->context = context;
  return made;
}

int dealloc_pd(ibv_pd* domain) {
  const auto held = net().lock();
  --net().handles;
  delete domain;
  return 0;
}

ibv_mr* reg_mr(ibv_pd* domain, void* memory, std::size_t bytes, int access) {
  const auto held = net().lock();
  if (const int error = net().refusal(bytes)) {
    ++net().refusals;
    errno = error;
    return nullptr;
  }
  const int device = net().cards ? net().cards->device_of_address(memory, bytes) : -1;
  if (device >= 0 && net().cards->registers_addresses() == 0) {
    errno = EFAULT;  // no pages of this process
    return nullptr;
  }
  // As ibv_fork_init() has it: children of a fork do not get these pages.
  CHECK(net().copies_at_fork || ::madvise(memory, bytes, MADV_DONTFORK) == 0,
        "%zu bytes at %p are not whole pages", bytes, memory);
  FakeRegion* made = make_region(domain, memory, bytes, access);
  made->device = device;
  return &made->handle;
}

ibv_mr* reg_dmabuf_mr(ibv_pd* domain, std::uint64_t offset, std::size_t bytes, std::uint64_t iova,
                      int descriptor, int access) {
  const auto held = net().lock();
  struct stat facts{};
  CHECK(::fstat(descriptor, &facts) == 0, "descriptor %d is not open", descriptor);
  CHECK(bytes != 0 && offset + bytes <= static_cast<std::uint64_t>(facts.st_size),
        "%zu bytes at %llu of %lld", bytes, static_cast<unsigned long long>(offset),
        static_cast<long long>(facts.st_size));
  CHECK(iova % kPage == offset % kPage, "iova and offset differ within their page");
  CHECK((access & IBV_ACCESS_REMOTE_WRITE) == 0 || (access & IBV_ACCESS_LOCAL_WRITE) != 0,
        "peers may write what the port itself may not");
  if (net().without_dmabufs.count(inside<FakeContext>(domain->context)->device) != 0) {
    errno = EOPNOTSUPP;
    return nullptr;
  }
  FakeRegion* made = make_region(domain, reinterpret_cast<void*>(iova), bytes, access);
  if (net().cards) made->device = net().cards->device_of_descriptor(descriptor);
  map(*made, descriptor, offset);
  return &made->handle;
}

int dereg_mr(ibv_mr* handle) {
  const auto held = net().lock();
  CHECK(!net().reads(*handle), "%zu bytes freed while they are sent", handle->length);
  auto* region = inside<FakeRegion>(handle);
  if (region->device >= 0) net().cards->settle(region->device);
  if (region->mapping != nullptr) ::munmap(region->mapping, region->mapping_bytes);
  net().registered_bytes -= handle->length;
  --net().handles;
  net().regions.erase(handle->lkey);
  net().regions.erase(handle->rkey);
  delete region;
  return 0;
}

}  // namespace pycoll::testing
