// A table of the libibverbs functions that pycoll calls. The library fills it at run time, or a
// test with its own provider. libibverbs implements ibv_poll_cq, ibv_post_send, ibv_post_recv and
// ibv_req_notify_cq inline through the context's own table, so they need no entry.
//
// Names and meanings are those of the ibv_* functions. Only verbs*.cpp and tests include this file;
// all other code builds without the header of libibverbs.
#pragma once

#include <infiniband/verbs.h>

#include <cstdint>
#include <cstring>
#include <string>
#include <type_traits>

namespace pycoll::transport::verbs {

struct Api {
  int (*fork_init)();
  ibv_device** (*get_device_list)(int* count);
  void (*free_device_list)(ibv_device** list);
  const char* (*get_device_name)(ibv_device* device);
  ibv_context* (*open_device)(ibv_device* device);
  int (*close_device)(ibv_context* context);
  int (*query_device)(ibv_context* context, ibv_device_attr* attributes);
  // The library may know a shorter ibv_port_attr than the header; the caller clears it beforehand.
  int (*query_port)(ibv_context* context, std::uint8_t port, ibv_port_attr* attributes);
  int (*query_gid)(ibv_context* context, std::uint8_t port, int index, ibv_gid* gid);
  ibv_pd* (*alloc_pd)(ibv_context* context);
  int (*dealloc_pd)(ibv_pd* domain);
  ibv_mr* (*reg_mr)(ibv_pd* domain, void* memory, std::size_t bytes, int access);
  int (*dereg_mr)(ibv_mr* region);
  ibv_comp_channel* (*create_comp_channel)(ibv_context* context);
  int (*destroy_comp_channel)(ibv_comp_channel* channel);
  ibv_cq* (*create_cq)(ibv_context* context, int entries, void* tag, ibv_comp_channel* channel,
                       int vector);
  int (*destroy_cq)(ibv_cq* queue);
  int (*get_cq_event)(ibv_comp_channel* channel, ibv_cq** queue, void** tag);
  void (*ack_cq_events)(ibv_cq* queue, unsigned int count);
  int (*get_async_event)(ibv_context* context, ibv_async_event* event);
  void (*ack_async_event)(ibv_async_event* event);
  ibv_qp* (*create_qp)(ibv_pd* domain, ibv_qp_init_attr* attributes);
  int (*modify_qp)(ibv_qp* pair, ibv_qp_attr* attributes, int mask);
  int (*destroy_qp)(ibv_qp* pair);
  const char* (*wc_status_str)(ibv_wc_status status);
  const char* (*event_type_str)(ibv_event_type type);
  // Any thread. IBV_FORK_UNNEEDED if the kernel gives children copies of pinned pages. nullptr if
  // the library is older than rdma-core 35.
  int (*is_fork_initialized)();
  // nullptr if the library is older than rdma-core 34.
  ibv_mr* (*reg_dmabuf_mr)(ibv_pd* domain, std::uint64_t offset, std::size_t bytes,
                           std::uint64_t iova, int descriptor, int access);
};

// A struct of libibverbs with zero in every field. Some of its enums have no enumerator of value 0.
template <typename Struct>
Struct make_cleared() {
  static_assert(std::is_trivially_copyable_v<Struct>);
  Struct made;
  std::memset(&made, 0, sizeof(made));
  return made;
}

// Opens the library once per process and keeps it open. Returns its functions, or nullptr with the
// reason in *why. Any thread.
[[nodiscard]] const Api* library(std::string* why);

}  // namespace pycoll::transport::verbs
