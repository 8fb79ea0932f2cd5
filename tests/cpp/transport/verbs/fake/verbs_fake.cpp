#include "tests/cpp/transport/verbs/fake/verbs_fake.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <span>

#include "tests/cpp/support/check.h"
#include "tests/cpp/transport/verbs/fake/verbs_fake_network.h"

namespace pycoll::testing {
namespace {

constexpr int kDevices = 16;
constexpr int kPorts = 2;
// Longer than a header or a notice: a payload.
constexpr std::uint32_t kPayloadMin = 1024;
int bell() { return ::eventfd(0, EFD_CLOEXEC | EFD_SEMAPHORE); }

bool rings(int fd) {
  std::uint64_t count = 0;
  return ::read(fd, &count, sizeof(count)) == sizeof(count);
}

// --- devices

ibv_device* devices() {
  static ibv_device all[kDevices];
  for (int i = 0; i < kDevices; ++i) {
    std::snprintf(all[i].name, sizeof(all[i].name), "fake%d", i);
  }
  return all;
}

ibv_device** get_device_list(int* count) {
  auto** list = new ibv_device*[kDevices + 1];
  for (int i = 0; i < kDevices; ++i) list[i] = devices() + i;
  list[kDevices] = nullptr;
  *count = kDevices;
  return list;
}

int fork_init() { return 0; }

int is_fork_initialized() {
  const auto held = net().lock();
  return net().copies_at_fork ? 2 : 1;
}
void free_device_list(ibv_device** list) { delete[] list; }
const char* get_device_name(ibv_device* device) { return device->name; }

int post_send(ibv_qp* handle, ibv_send_wr* requests, ibv_send_wr** refused);
int post_recv(ibv_qp* handle, ibv_recv_wr* requests, ibv_recv_wr** refused);
int poll_cq(ibv_cq* handle, int slot_buffer, ibv_wc* into);
int req_notify_cq(ibv_cq* handle, int solicited_only);

ibv_context* open_device(ibv_device* device) {
  auto* made = new FakeContext;
  made->device = static_cast<int>(device - devices());
  made->handle.device = device;
  made->handle.async_fd = bell();
  made->handle.ops.post_send = post_send;
  made->handle.ops.post_recv = post_recv;
  made->handle.ops.poll_cq = poll_cq;
  made->handle.ops.req_notify_cq = req_notify_cq;
  const auto held = net().lock();
  ++net().handles;
  net().contexts.insert(made);
  return &made->handle;
}

int close_device(ibv_context* handle) {
  auto* context = inside<FakeContext>(handle);
  const auto held = net().lock();
  --net().handles;
  net().contexts.erase(context);
  ::close(handle->async_fd);
  delete context;
  return 0;
}

int query_device(ibv_context*, ibv_device_attr* attributes) {
  *attributes = {};
  attributes->max_cqe = 1 << 15;
  return 0;
}

int query_port(ibv_context*, std::uint8_t port, ibv_port_attr* attributes) {
  *attributes = {};
  if (port < 1 || port > kPorts) return EINVAL;
  attributes->state = IBV_PORT_ACTIVE;
  attributes->active_mtu = IBV_MTU_1024;
  attributes->link_layer = IBV_LINK_LAYER_ETHERNET;
  return 0;
}

int query_gid(ibv_context*, std::uint8_t, int, ibv_gid* gid) {
  *gid = {};
  return 0;
}

int get_async_event(ibv_context* handle, ibv_async_event* event) {
  auto* context = inside<FakeContext>(handle);
  if (!rings(handle->async_fd)) return -1;
  const auto held = net().lock();
  *event = {};
  event->event_type = context->events.front().first;
  event->element.port_num = context->events.front().second;
  context->events.pop_front();
  return 0;
}

void ack_async_event(ibv_async_event*) {}

// --- completions

ibv_comp_channel* create_comp_channel(ibv_context* context) {
  const auto held = net().lock();
  ++net().handles;
  auto* made = new FakeChannel;
  made->handle.context = context;
  made->handle.fd = bell();
  return &made->handle;
}

int destroy_comp_channel(ibv_comp_channel* handle) {
  const auto held = net().lock();
  --net().handles;
  ::close(handle->fd);
  delete inside<FakeChannel>(handle);
  return 0;
}

ibv_cq* create_cq(ibv_context* context, int entries, void*, ibv_comp_channel* channel, int) {
  const auto held = net().lock();
  ++net().handles;
  auto* made = new FakeCompletions;
  made->handle.context = context;
  made->handle.channel = channel;
  made->capacity = static_cast<std::size_t>(entries);
  inside<FakeChannel>(channel)->queue = made;
  return &made->handle;
}

int destroy_cq(ibv_cq* handle) {
  const auto held = net().lock();
  --net().handles;
  auto* queue = inside<FakeCompletions>(handle);
  CHECK(queue->unacknowledged == 0, "%u events not acknowledged", queue->unacknowledged);
  delete queue;
  return 0;
}

int get_cq_event(ibv_comp_channel* channel, ibv_cq** queue, void** tag) {
  if (!rings(channel->fd)) return -1;
  const auto held = net().lock();
  FakeCompletions* source = inside<FakeChannel>(channel)->queue;
  ++source->unacknowledged;
  *queue = &source->handle;
  *tag = nullptr;
  return 0;
}

void ack_cq_events(ibv_cq* handle, unsigned int count) {
  const auto held = net().lock();
  inside<FakeCompletions>(handle)->unacknowledged -= count;
}

// Requests that do not tell leave the queue with the next one that does.
void make_space(const ibv_wc& told) {
  const auto found = net().pairs.find(told.qp_num);
  if (found == net().pairs.end() || (told.opcode & IBV_WC_RECV) != 0) return;
  std::deque<bool>& under_way = found->second->under_way;
  for (bool last = false; !last && !under_way.empty(); under_way.pop_front()) {
    last = under_way.front();
  }
}

int poll_cq(ibv_cq* handle, int slot_buffer, ibv_wc* into) {
  const auto held = net().lock();
  for (int i = 0; i < 3 && net().step(); ++i) {
  }
  auto& waiting = inside<FakeCompletions>(handle)->waiting;
  int count = 0;
  while (count < slot_buffer && !waiting.empty()) {
    into[count++] = waiting.front();
    make_space(waiting.front());
    waiting.pop_front();
  }
  return count;
}

int req_notify_cq(ibv_cq* handle, int solicited_only) {
  CHECK(solicited_only == 0, "only plain notification is known");
  const auto held = net().lock();
  inside<FakeCompletions>(handle)->armed = true;
  return 0;
}

// --- pairs

ibv_qp* create_qp(ibv_pd* domain, ibv_qp_init_attr* wanted) {
  const auto held = net().lock();
  if (wanted->cap.max_inline_data > net().options.inline_max) {
    errno = EINVAL;
    return nullptr;
  }
  ++net().handles;
  auto* made = new FakePair;
  made->device = inside<FakeContext>(domain->context)->device;
  made->handle.context = domain->context;
  made->handle.send_cq = wanted->send_cq;
  made->handle.recv_cq = wanted->recv_cq;
  made->handle.qp_num = net().next_number++;
  made->handle.state = IBV_QPS_RESET;
  made->limits = wanted->cap;
  net().pairs[made->handle.qp_num] = made;
  return &made->handle;
}

int modify_qp(ibv_qp* handle, ibv_qp_attr* wanted, int mask) {
  const auto held = net().lock();
  auto* pair = inside<FakePair>(handle);
  if (wanted->qp_state == IBV_QPS_ERR) {
    net().fail(*pair, IBV_WC_WR_FLUSH_ERR);
    return 0;
  }
  CHECK((mask & IBV_QP_STATE) != 0 && wanted->qp_state == handle->state + 1,
        "a pair goes from state %d to %d", handle->state, wanted->qp_state);
  handle->state = wanted->qp_state;
  if ((mask & IBV_QP_PORT) != 0) pair->port = wanted->port_num;
  if ((mask & IBV_QP_DEST_QPN) != 0) pair->peer = wanted->dest_qp_num;
  return 0;
}

int destroy_qp(ibv_qp* handle) {
  const auto held = net().lock();
  --net().handles;
  net().pairs.erase(handle->qp_num);
  delete inside<FakePair>(handle);
  return 0;
}

int post_recv(ibv_qp* handle, ibv_recv_wr* request, ibv_recv_wr** refused) {
  const auto held = net().lock();
  auto* pair = inside<FakePair>(handle);
  for (; request != nullptr; request = request->next) {
    if (pair->receives.size() == pair->limits.max_recv_wr) {
      *refused = request;
      return ENOMEM;
    }
    pair->receives.push_back(request->wr_id);
  }
  return 0;
}

void copy_inline(const ibv_sge& piece, FakeRequest* made) {
  const auto* data = reinterpret_cast<const std::byte*>(piece.addr);
  const auto& cards = net().cards;
  CHECK(!cards || cards->device_of_address(data, piece.length) < 0,
        "%u bytes of a device inline, where the host would read them", piece.length);
  made->copied.insert(made->copied.end(), data, data + piece.length);
}

FakeSource source_of(const FakePair& pair, const ibv_sge& piece) {
  const FakeRegion* region = net().region(piece.lkey, piece.addr, piece.length);
  CHECK(region != nullptr && region->handle.lkey == piece.lkey, "%u bytes without a key",
        piece.length);
  if (region->is_of_device()) net().taken_bytes += piece.length;
  if (piece.length >= kPayloadMin) {
    if (!region->is_of_device()) net().hosts_bytes += piece.length;
    net().sent[reinterpret_cast<const std::byte*>(piece.addr)] += piece.length;
    net().sent_over[{pair.device, pair.port}] += piece.length;
  }
  return {region->at(piece.addr), piece.length, piece.lkey};
}

FakeRequest request_of(const FakePair& pair, const ibv_send_wr& wanted) {
  FakeRequest made;
  made.completion.wr_id = wanted.wr_id;
  made.completion.opcode = IBV_WC_RDMA_WRITE;
  made.completion.qp_num = pair.handle.qp_num;
  made.tells = (wanted.send_flags & IBV_SEND_SIGNALED) != 0;
  made.immediate = wanted.opcode == IBV_WR_RDMA_WRITE_WITH_IMM;
  made.immediate_bits = wanted.imm_data;
  if (const auto other = net().rewritten.find(wanted.imm_data); other != net().rewritten.end()) {
    made.immediate_bits = other->second;
  }
  made.target = wanted.wr.rdma.remote_addr;
  made.key = wanted.wr.rdma.rkey;
  CHECK(wanted.num_sge <= static_cast<int>(pair.limits.max_send_sge), "%d pieces", wanted.num_sge);
  const std::span pieces(wanted.sg_list, static_cast<std::size_t>(wanted.num_sge));
  const bool is_inline = (wanted.send_flags & IBV_SEND_INLINE) != 0;
  for (const ibv_sge& piece : pieces) {
    made.bytes += piece.length;
    if (is_inline) {
      copy_inline(piece, &made);
    } else {
      made.sources.push_back(source_of(pair, piece));
    }
  }
  CHECK(!is_inline || made.bytes <= pair.limits.max_inline_data, "%u bytes inline", made.bytes);
  if (made.bytes == 0) return made;
  const std::uint32_t packets = (made.bytes - 1) / FakeNetwork::kPacketBytes + 1;
  for (std::uint32_t i = 0; i < packets; ++i) made.packets.push_back(i);
  return made;
}

int post_send(ibv_qp* handle, ibv_send_wr* request, ibv_send_wr** refused) {
  {
    const auto held = net().lock();
    auto* pair = inside<FakePair>(handle);
    CHECK(handle->state == IBV_QPS_RTS || handle->state == IBV_QPS_ERR, "sent in state %d",
          handle->state);
    for (; request != nullptr; request = request->next) {
      if (pair->under_way.size() == pair->limits.max_send_wr) {
        *refused = request;
        return ENOMEM;
      }
      pair->sends.push_back(request_of(*pair, *request));
      pair->under_way.push_back(pair->sends.back().tells);
    }
    if (handle->state == IBV_QPS_ERR) net().fail(*pair, IBV_WC_WR_FLUSH_ERR);
  }
  net().wake();
  return 0;
}

const char* wc_status_str(ibv_wc_status status) {
  if (status == IBV_WC_RETRY_EXC_ERR) return "transport retry counter exceeded";
  return status == IBV_WC_LOC_QP_OP_ERR ? "local QP operation error" : "Work Request Flushed Error";
}

const char* event_type_str(ibv_event_type type) {
  return type == IBV_EVENT_PORT_ERR ? "port error" : "another event";
}

}  // namespace

const transport::verbs::Api& FakeVerbs::api() {
  static const transport::verbs::Api table = {
      fork_init,       get_device_list,     free_device_list,
      get_device_name, open_device,         close_device,
      query_device,    query_port,          query_gid,
      alloc_pd,        dealloc_pd,          reg_mr,
      dereg_mr,        create_comp_channel, destroy_comp_channel,
      create_cq,       destroy_cq,          get_cq_event,
      ack_cq_events,   get_async_event,     ack_async_event,
      create_qp,       modify_qp,           destroy_qp,
      wc_status_str,   event_type_str,      is_fork_initialized,
      reg_dmabuf_mr,
  };
  return table;
}

const transport::verbs::Api& FakeVerbs::old_api() {
  static const transport::verbs::Api table = [] {
    transport::verbs::Api old = api();
    old.reg_dmabuf_mr = nullptr;
    return old;
  }();
  return table;
}

}  // namespace pycoll::testing
