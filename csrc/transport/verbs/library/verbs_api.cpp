#include "transport/verbs/library/verbs_api.h"

#include <dlfcn.h>

namespace pycoll::transport::verbs {
namespace {

struct Library {
  Api api{};
  std::string missing;  // why the table cannot be used; empty if it can
};

// Sets `entry` to the function `name`. Records the first function that the library lacks.
template <typename Function>
void find(void* library, const char* name, Function*& entry, std::string& missing) {
  entry = reinterpret_cast<Function*>(::dlsym(library, name));
  if (entry == nullptr && missing.empty()) {
    missing = std::string("libibverbs.so.1 has no ") + name + "; install a newer rdma-core";
  }
}

Library open_library() {
  Library opened;
  // Never closed, because providers keep threads and handlers of their own.
  void* handle = ::dlopen("libibverbs.so.1", RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    const char* error = ::dlerror();
    opened.missing = std::string("libibverbs.so.1 cannot be opened (") +
                     (error != nullptr ? error : "no reason given") +
                     "); install libibverbs1 and ibverbs-providers (Debian) or libibverbs (Fedora)";
    return opened;
  }
  Api& api = opened.api;
  const auto get = [&](const char* name, auto& entry) {
    find(handle, name, entry, opened.missing);
  };
  get("ibv_fork_init", api.fork_init);
  std::string optional;
  find(handle, "ibv_is_fork_initialized", api.is_fork_initialized, optional);
  find(handle, "ibv_reg_dmabuf_mr", api.reg_dmabuf_mr, optional);
  get("ibv_get_device_list", api.get_device_list);
  get("ibv_free_device_list", api.free_device_list);
  get("ibv_get_device_name", api.get_device_name);
  get("ibv_open_device", api.open_device);
  get("ibv_close_device", api.close_device);
  get("ibv_query_device", api.query_device);
  get("ibv_query_port", api.query_port);
  get("ibv_query_gid", api.query_gid);
  get("ibv_alloc_pd", api.alloc_pd);
  get("ibv_dealloc_pd", api.dealloc_pd);
  get("ibv_reg_mr", api.reg_mr);
  get("ibv_dereg_mr", api.dereg_mr);
  get("ibv_create_comp_channel", api.create_comp_channel);
  get("ibv_destroy_comp_channel", api.destroy_comp_channel);
  get("ibv_create_cq", api.create_cq);
  get("ibv_destroy_cq", api.destroy_cq);
  get("ibv_get_cq_event", api.get_cq_event);
  get("ibv_ack_cq_events", api.ack_cq_events);
  get("ibv_get_async_event", api.get_async_event);
  get("ibv_ack_async_event", api.ack_async_event);
  get("ibv_create_qp", api.create_qp);
  get("ibv_modify_qp", api.modify_qp);
  get("ibv_destroy_qp", api.destroy_qp);
  get("ibv_wc_status_str", api.wc_status_str);
  get("ibv_event_type_str", api.event_type_str);
  // Called before anything is registered, so that a fork does not take pinned pages from the
  // parent. The call fails only if the kernel has no MADV_DONTFORK; pycoll does not support such
  // kernels.
  if (opened.missing.empty()) (void)api.fork_init();
  return opened;
}

}  // namespace

const Api* library(std::string* why) {
  static const Library opened = open_library();
  if (opened.missing.empty()) return &opened.api;
  *why = opened.missing;
  return nullptr;
}

}  // namespace pycoll::transport::verbs
