// The fake provider by the name of the real library, so that dlopen finds it: for tests in Python,
// whose ranks are threads of one process. Its cards reach the memory of the devices of a fake CUDA
// driver that is found in the same way. FAKE_VERBS_SEED draws what the network does.
#include <dlfcn.h>

#include <cstdlib>

#include "tests/cpp/support/check.h"
#include "tests/cpp/transport/verbs/fake/verbs_fake.h"

#undef ibv_query_port
#undef ibv_reg_mr

namespace pycoll::testing {
namespace {

const transport::verbs::Api& api() { return FakeVerbs::api(); }

// Made when devices are first asked for; its thread runs until the process ends.
FakeVerbs& network() {
  static FakeVerbs* const only = [] {
    const char* seed = std::getenv("FAKE_VERBS_SEED");
    auto* made = new FakeVerbs({.seed = seed == nullptr ? 1 : std::strtoull(seed, nullptr, 10)});
    void* driver = ::dlopen("libcuda.so.1", RTLD_NOW);
    CHECK(driver != nullptr, "no fake driver: %s", ::dlerror());
    made->reach(FakeCards::of(driver));
    return made;
  }();
  return *only;
}

}  // namespace
}  // namespace pycoll::testing

using namespace pycoll::testing;

#pragma GCC visibility push(default)
extern "C" {

int ibv_fork_init() { return api().fork_init(); }
ibv_device** ibv_get_device_list(int* count) {
  (void)network();
  return api().get_device_list(count);
}
void ibv_free_device_list(ibv_device** list) { api().free_device_list(list); }
const char* ibv_get_device_name(ibv_device* device) { return api().get_device_name(device); }
ibv_context* ibv_open_device(ibv_device* device) { return api().open_device(device); }
int ibv_close_device(ibv_context* context) { return api().close_device(context); }
int ibv_query_device(ibv_context* context, ibv_device_attr* attributes) {
  return api().query_device(context, attributes);
}
int ibv_query_port(ibv_context* context, std::uint8_t port, _compat_ibv_port_attr* attributes) {
  return api().query_port(context, port, reinterpret_cast<ibv_port_attr*>(attributes));
}
int ibv_query_gid(ibv_context* context, std::uint8_t port, int index, ibv_gid* gid) {
  return api().query_gid(context, port, index, gid);
}
ibv_pd* ibv_alloc_pd(ibv_context* context) { return api().alloc_pd(context); }
int ibv_dealloc_pd(ibv_pd* domain) { return api().dealloc_pd(domain); }
ibv_mr* ibv_reg_mr(ibv_pd* domain, void* memory, std::size_t bytes, int access) {
  return api().reg_mr(domain, memory, bytes, access);
}
ibv_mr* ibv_reg_dmabuf_mr(ibv_pd* domain, std::uint64_t offset, std::size_t bytes,
                          std::uint64_t iova, int descriptor, int access) {
  return api().reg_dmabuf_mr(domain, offset, bytes, iova, descriptor, access);
}
int ibv_dereg_mr(ibv_mr* region) { return api().dereg_mr(region); }
ibv_comp_channel* ibv_create_comp_channel(ibv_context* context) {
  return api().create_comp_channel(context);
}
int ibv_destroy_comp_channel(ibv_comp_channel* channel) {
  return api().destroy_comp_channel(channel);
}
ibv_cq* ibv_create_cq(ibv_context* context, int entries, void* tag, ibv_comp_channel* channel,
                      int vector) {
  return api().create_cq(context, entries, tag, channel, vector);
}
int ibv_destroy_cq(ibv_cq* queue) { return api().destroy_cq(queue); }
int ibv_get_cq_event(ibv_comp_channel* channel, ibv_cq** queue, void** tag) {
  return api().get_cq_event(channel, queue, tag);
}
void ibv_ack_cq_events(ibv_cq* queue, unsigned int count) { api().ack_cq_events(queue, count); }
int ibv_get_async_event(ibv_context* context, ibv_async_event* event) {
  return api().get_async_event(context, event);
}
void ibv_ack_async_event(ibv_async_event* event) { api().ack_async_event(event); }
ibv_qp* ibv_create_qp(ibv_pd* domain, ibv_qp_init_attr* attributes) {
  return api().create_qp(domain, attributes);
}
int ibv_modify_qp(ibv_qp* pair, ibv_qp_attr* attributes, int mask) {
  return api().modify_qp(pair, attributes, mask);
}
int ibv_destroy_qp(ibv_qp* pair) { return api().destroy_qp(pair); }
const char* ibv_wc_status_str(ibv_wc_status status) { return api().wc_status_str(status); }
const char* ibv_event_type_str(ibv_event_type type) { return api().event_type_str(type); }

// For tests: see FakeVerbs.
std::uint64_t pycoll_fake_directly_written_bytes() { return network().directly_written_bytes(); }
std::uint64_t pycoll_fake_taken_bytes() { return network().taken_bytes(); }

}  // extern "C"
#pragma GCC visibility pop
