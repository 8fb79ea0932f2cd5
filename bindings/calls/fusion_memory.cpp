#include "bindings/calls/fusion_memory.h"

#include <bit>
#include <new>

#include "shared_memory/shm_arena.h"

namespace pycoll::bindings {
namespace {

using transport::shm::Arena;

constexpr std::align_val_t kLine{64};

}  // namespace

void FusionMemory::Free::operator()(std::byte* memory) const {
  Arena::owns(memory) ? Arena::free(memory) : ::operator delete(memory, kLine);
}

std::byte* FusionMemory::of(std::size_t bytes) {
  if (bytes <= bytes_) return memory_.get();
  bytes_ = 0;
  memory_.reset();
  const std::size_t space = std::bit_ceil(bytes);
  if (reachable_) memory_.reset(Arena::of_process().allocate(space));
  if (memory_ == nullptr) memory_.reset(static_cast<std::byte*>(::operator new(space, kLine)));
  bytes_ = space;
  return memory_.get();
}

}  // namespace pycoll::bindings
