// Domains and memory of the fake provider.
#include <sys/mman.h>

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
