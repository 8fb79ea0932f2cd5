// Domains and memory of the fake provider.
#include <sys/mman.h>
#include <sys/stat.h>

#include <cerrno>

#include "check.h"
#include "verbs_fake_network.h"

namespace pycoll::testing {
namespace {

// Requires: the network's lock.
ibv_mr* make_region(ibv_pd* domain, void* address, std::size_t bytes, int access) {
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
  return &made->handle;
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
  // As ibv_fork_init() has it: children of a fork do not get these pages.
  CHECK(net().copies_at_fork || ::madvise(memory, bytes, MADV_DONTFORK) == 0,
        "%zu bytes at %p are not whole pages", bytes, memory);
  return make_region(domain, memory, bytes, access);
}

ibv_mr* reg_dmabuf_mr(ibv_pd* domain, std::uint64_t offset, std::size_t bytes, std::uint64_t iova,
                      int descriptor, int access) {
  const auto held = net().lock();
  struct stat facts{};
  CHECK(::fstat(descriptor, &facts) == 0, "descriptor %d is not open", descriptor);
  CHECK(bytes != 0 && offset + bytes <= static_cast<std::uint64_t>(facts.st_size),
        "%zu bytes at %llu of %lld", bytes, static_cast<unsigned long long>(offset),
        static_cast<long long>(facts.st_size));
  CHECK(iova % 4096 == offset % 4096, "iova and offset differ within their page");
  CHECK((access & IBV_ACCESS_REMOTE_WRITE) == 0 || (access & IBV_ACCESS_LOCAL_WRITE) != 0,
        "peers may write what the port itself may not");
  if (net().without_dmabufs.count(inside<FakeContext>(domain->context)->device) != 0) {
    errno = EOPNOTSUPP;
    return nullptr;
  }
  return make_region(domain, reinterpret_cast<void*>(iova), bytes, access);
}

int dereg_mr(ibv_mr* handle) {
  const auto held = net().lock();
  CHECK(!net().reads(*handle), "%zu bytes freed while they are sent", handle->length);
  net().registered_bytes -= handle->length;
  --net().handles;
  net().regions.erase(handle->lkey);
  net().regions.erase(handle->rkey);
  delete inside<FakeRegion>(handle);
  return 0;
}

}  // namespace pycoll::testing
