// What the files of the fake driver's functions share; only they include it.
#pragma once

#include <map>
#include <memory>
#include <set>
#include <vector>

#include "device/driver/driver.h"
#include "tests/cpp/device/fake_driver/cuda_fake.h"

#define EXPORT extern "C" __attribute__((visibility("default")))
// The first lines of every function: a fault that was asked for, and the lock.
#define BEGIN()                      \
  Machine& machine = Machine::get(); \
  auto held = machine.lock();        \
  if (int fault = machine.refused(__func__); fault != 0) return fault
// Of a function that needs a current context; `device` is its device.
#define BEGIN_IN_CONTEXT()                        \
  BEGIN();                                        \
  if (contexts().empty()) return kInvalidContext; \
  [[maybe_unused]] Device& device = *contexts().back()
// Of a function that no capture allows.
#define BEGIN_UNSAFE() \
  BEGIN_IN_CONTEXT();  \
  if (const int forbidden = machine.unsafe(); forbidden != 0) return forbidden

namespace pycoll::testing::fake {

using device::Address;

// Contexts of the calling thread, the current one last; each is its device.
std::vector<Device*>& contexts();

struct Handles {
  std::map<void*, std::shared_ptr<Stream>> streams;
  std::set<Event*> events;
  std::vector<Kernel> kernels;
};
// Requires: the machine is locked, here and below.
Handles& handles();

// nullptr: there is no such stream.
std::shared_ptr<Stream> find_stream(Machine& machine, Device& device, void* handle);
// For work in the stream: it must exist and be of the current context.
Error usable(Machine& machine, Device& device, void* handle, std::shared_ptr<Stream>* stream);
Error add(Machine& machine, Device& device, void* handle, Op op);

}  // namespace pycoll::testing::fake
