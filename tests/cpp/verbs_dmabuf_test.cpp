// Memory of devices that ports register by its dma-buf: here a memfd, whose use the fake provider
// checks.
#include <sys/mman.h>
#include <unistd.h>

#include <memory>
#include <set>
#include <string>

#include "base/unique_fd.h"
#include "verbs_fixture.h"

namespace pycoll::testing {
namespace {

using transport::VerbsTransport;
using transport::verbs::DmaBuf;
using transport::verbs::DmaBufRegistration;
using transport::verbs::MemoryKeys;

constexpr std::size_t kBytes = 1 << 20;
constexpr std::uint64_t kAddress = std::uint64_t{0x7f} << 32;  // somewhere in a device

UniqueFd export_memory() {
  UniqueFd made(::memfd_create("dmabuf", MFD_CLOEXEC));
  CHECK(made.valid() && ::ftruncate(made.get(), kBytes) == 0, "no memory");
  return made;
}

void refused(const Status& status, Code code, const std::string& words) {
  CHECK(status.code() == code && status.message().find(words) != std::string::npos, "says: %s",
        status.message().c_str());
}

TEST(memory_of_a_device_is_registered_at_every_port) {
  FakeVerbs fake({});
  auto transport = make_fake(0, 2, kSmallLimits, 2);
  UniqueFd memory = export_memory();
  DmaBufRegistration whole;
  DmaBufRegistration part;
  CHECK(transport->register_dmabuf({memory.get(), 0, kBytes, kAddress, true}, &whole).ok(), "?");
  const DmaBuf inside{memory.get(), 4096 + 100, 777, kAddress + 100, false};
  CHECK(transport->register_dmabuf(inside, &part).ok(), "not from within a page");
  memory.reset();  // the descriptor is not needed any more
  CHECK(fake.registered_bytes() == 2 * (kBytes + 777), "%zu bytes", fake.registered_bytes());
  CHECK(whole.number != part.number, "the same number");
  std::set<std::uint32_t> keys;
  for (const DmaBufRegistration& one : {whole, part}) {
    CHECK(one.by_port.size() == 2, "%zu ports", one.by_port.size());
    for (const MemoryKeys& port : one.by_port) keys.insert({port.local, port.remote});
  }
  CHECK(keys.size() == 8, "%zu different keys", keys.size());
  CHECK(transport->registered().pinned_bytes == 0, "counted as memory of the host");
  transport->release_dmabuf(part.number);
  transport->release_dmabuf(part.number);
  CHECK(fake.registered_bytes() == 2 * kBytes, "%zu bytes", fake.registered_bytes());
  transport->close();  // with the other one
  refused(transport->register_dmabuf(inside, &part), Code::kClosed, "was closed");
  transport->release_dmabuf(whole.number);
}

TEST(what_cannot_be_memory_of_a_device_is_refused_before_any_port_sees_it) {
  FakeVerbs fake({});
  auto transport = make_fake(0, 2);
  const UniqueFd memory = export_memory();
  DmaBufRegistration made;
  const auto check = [&](const DmaBuf& wrong, const char* words) {
    refused(transport->register_dmabuf(wrong, &made), Code::kInvalidArgument, words);
  };
  check({-1, 0, kBytes, kAddress, false}, "descriptor -1: expected an open one");
  check({memory.get(), 5, 0, kAddress + 5, false}, "0 bytes at offset 5");
  check({memory.get(), ~std::uint64_t{0} - 95, 4096, kAddress + 4000, false}, "end below 2^64");
  check({memory.get(), 8, 16, kAddress + 9, false}, "the same place within a page of 4096 bytes");
  CHECK(made.number == 0 && fake.registered_bytes() == 0, "registered");
}

TEST(a_port_or_library_that_cannot_register_it_says_so) {
  FakeVerbs fake({});
  const UniqueFd memory = export_memory();
  const DmaBuf whole{memory.get(), 0, kBytes, kAddress, true};
  DmaBufRegistration made;
  auto transport = make_fake(0, 2, kSmallLimits, 2);
  fake.refuse_dmabufs(1);
  refused(transport->register_dmabuf(whole, &made), Code::kTransport,
          "fake1 port 1: cannot register 1048576 bytes of a device's memory: Operation not supp");
  CHECK(fake.registered_bytes() == 0, "the first port kept it");
  std::unique_ptr<VerbsTransport> old;
  const Status opened =
      VerbsTransport::create(0, 2, {FakeVerbs::port(0)}, FakeVerbs::old_api(), kSmallLimits, &old);
  CHECK(opened.ok(), "%s", opened.message().c_str());
  refused(old->register_dmabuf(whole, &made), Code::kTransport, "install rdma-core 34 or newer");
}

}  // namespace
}  // namespace pycoll::testing

RUN_TESTS()
