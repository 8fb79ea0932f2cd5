#include "transport/verbs/library/verbs_device.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <system_error>
#include <utility>

namespace pycoll::transport::verbs {
namespace {

std::string reason_of(int error) { return std::generic_category().message(error); }

std::string kib(std::uint64_t bytes) { return std::to_string(bytes / 1024) + " KiB"; }

// Advice for a process that cannot pin pages; empty if the memlock limit is not the cause.
std::string memlock_advice() {
  rlimit limit{};
  if (::getrlimit(RLIMIT_MEMLOCK, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return "";
  return "; this process may lock " + kib(limit.rlim_cur) +
         " of memory: raise that with `ulimit -l unlimited` before it starts (for good: a line `* "
         "- "
         "memlock unlimited` in /etc/security/limits.conf, LimitMEMLOCK=infinity for a systemd "
         "service, --ulimit memlock=-1 for a container)";
}

bool make_quiet(int fd) {
  const int flags = ::fcntl(fd, F_GETFL);
  return flags >= 0 && ::fcntl(fd, F_SETFL, flags | O_NONBLOCK) == 0;
}

ibv_context* open_named(const Api& api, const std::string& name, std::string* found) {
  int count = 0;
  ibv_device** list = api.get_device_list(&count);
  ibv_context* context = nullptr;
  for (int i = 0; list != nullptr && i < count; ++i) {
    const char* candidate = api.get_device_name(list[i]);
    *found += (found->empty() ? "" : ", ") + std::string(candidate);
    if (name == candidate) {
      context = api.open_device(list[i]);
      break;
    }
  }
  if (list != nullptr) api.free_device_list(list);
  return context;
}

}  // namespace

Device::Device(const Api& api, VerbsPort port, ibv_context* context)
    : api_(api),
      port_(std::move(port)),
      context_(context, api.close_device),
      domain_(nullptr, api.dealloc_pd),
      channel_(nullptr, api.destroy_comp_channel),
      completions_(nullptr, api.destroy_cq) {}

Device::~Device() {
  if (completions_ != nullptr) drop_events();
}

std::string Device::name() const { return port_.device + " port " + std::to_string(port_.port); }

Status Device::refused(const std::string& what, int error) const {
  const bool memory = error == ENOMEM || error == EAGAIN || error == EPERM;
  return Status::error(Code::kTransport, "verbs: " + name() + ": " + what + ": " +
                                             reason_of(error) + (memory ? memlock_advice() : ""));
}

Status Device::open(const Api& api, const VerbsPort& port, int completions,
                    std::unique_ptr<Device>* opened) {
  std::string found;
  errno = 0;
  ibv_context* context = open_named(api, port.device, &found);
  if (context == nullptr) {
    const int error = errno;
    const bool seen = found.size() >= port.device.size() && found.ends_with(port.device);
    if (seen) {
      return Status::error(Code::kTransport, "verbs: cannot open " + port.device + ": " +
                                                 reason_of(error) +
                                                 "; may this user open /dev/infiniband/uverbs*?");
    }
    return Status::error(Code::kInvalidArgument,
                         "verbs: there is no device \"" + port.device + "\"; there are: " +
                             (found.empty() ? "none (are the drivers for libibverbs installed, "
                                              "ibverbs-providers on Debian?)"
                                            : found));
  }
  std::unique_ptr<Device> device(new Device(api, port, context));
  Status status = device->look_at_port();
  if (status.ok()) status = device->make(completions);
  if (status.ok()) *opened = std::move(device);
  return status;
}

Status Device::look_at_port() {
  const auto number = static_cast<std::uint8_t>(port_.port);
  int error = api_.query_port(context_.get(), number, &port_facts_);
  if (error != 0) return refused("cannot ask about the port", error);
  if (port_facts_.state != IBV_PORT_ACTIVE) {
    return Status::error(Code::kTransport, "verbs: " + name() + " is not active; is the link up?");
  }
  error = api_.query_gid(context_.get(), number, port_.gid_index, &gid_);
  if (error != 0) {
    return refused("cannot read GID " + std::to_string(port_.gid_index), errno != 0 ? errno : EIO);
  }
  return {};
}

Status Device::make(int completions) {
  ibv_device_attr limits{};
  if (const int error = api_.query_device(context_.get(), &limits); error != 0) {
    return refused("cannot ask for its limits", error);
  }
  if (completions > limits.max_cqe) {
    return Status::error(Code::kTransport, "verbs: " + name() + " queues " +
                                               std::to_string(limits.max_cqe) +
                                               " completions at most, this communicator needs " +
                                               std::to_string(completions) + "; use fewer ranks");
  }
  domain_.reset(api_.alloc_pd(context_.get()));
  if (domain_ == nullptr) return refused("cannot make a protection domain", errno);
  channel_.reset(api_.create_comp_channel(context_.get()));
  if (channel_ == nullptr) return refused("cannot make a channel of events", errno);
  if (!make_quiet(channel_->fd) || !make_quiet(context_->async_fd)) {
    return refused("cannot make its descriptors non-blocking", errno);
  }
  completions_.reset(api_.create_cq(context_.get(), completions, nullptr, channel_.get(), 0));
  if (completions_ == nullptr) {
    return refused("cannot make a queue of " + std::to_string(completions) + " completions", errno);
  }
  return {};
}

int Device::take(std::span<ibv_wc> into) {
  return context_->ops.poll_cq(completions_.get(), static_cast<int>(into.size()), into.data());
}

void Device::ask_for_event() { (void)context_->ops.req_notify_cq(completions_.get(), 0); }

void Device::drop_events() {
  ibv_cq* queue = nullptr;
  void* tag = nullptr;
  unsigned int count = 0;
  while (api_.get_cq_event(channel_.get(), &queue, &tag) == 0) ++count;
  if (count != 0) api_.ack_cq_events(completions_.get(), count);
}

bool Device::take_trouble() {
  ibv_async_event event{};
  bool fatal = false;
  while (api_.get_async_event(context_.get(), &event) == 0) {
    const ibv_event_type type = event.event_type;
    const bool breaks = type == IBV_EVENT_DEVICE_FATAL || type == IBV_EVENT_CQ_ERR;
    const bool of_port = type == IBV_EVENT_PORT_ERR || type == IBV_EVENT_PORT_ACTIVE;
    fatal |= breaks;
    // Events of the device's other ports arrive here too.
    if (of_port && event.element.port_num != port_.port) {
      api_.ack_async_event(&event);
      continue;
    }
    if (breaks || type == IBV_EVENT_PORT_ERR) trouble_ = api_.event_type_str(type);
    if (type == IBV_EVENT_PORT_ACTIVE && !fatal) trouble_.clear();
    api_.ack_async_event(&event);
  }
  return fatal;
}

Status Area::make(const Device& device, std::size_t bytes, int access,
                  std::unique_ptr<Area>* made) {
  void* memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return device.refused("cannot get " + kib(bytes) + " of memory", errno);
  std::unique_ptr<Area> area(new Area(static_cast<std::byte*>(memory), bytes, device.api()));
  area->region_.reset(device.api().reg_mr(device.domain(), memory, bytes, access));
  if (area->region_ == nullptr) {
    return device.refused("cannot register " + kib(bytes) + " of memory", errno);
  }
  *made = std::move(area);
  return {};
}

Area::~Area() {
  region_.reset();
  (void)::munmap(memory_, bytes_);
}

}  // namespace pycoll::transport::verbs
