#include "transport/verbs/verbs_queue.h"

#include <arpa/inet.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <random>

#include "base/assert.h"

namespace pycoll::transport::verbs {
namespace {

// Inline bytes to request, largest first, because devices refuse values above their limit.
constexpr std::uint32_t kInlineSizes[] = {256, 128, 64, 0};

// An unanswered packet is sent again after 4.096 microseconds * 2^kAckTimeout = 0.27 s (devices may
// take up to four times as long), kRetries times. The loss of a peer is thus reported after 2 to 8
// s. Seven retries would mean infinitely many on some devices.
constexpr std::uint8_t kAckTimeout = 16;
constexpr std::uint8_t kRetries = 6;
// Time between retries if the peer has no receive posted, which the flow control excludes: 0.64 ms.
constexpr std::uint8_t kNotReadyTimer = 12;

ibv_qp_attr attributes(ibv_qp_state state) {
  auto made = make_cleared<ibv_qp_attr>();
  made.qp_state = state;
  return made;
}

}  // namespace

Queue::Queue(const Device& device, std::uint32_t number, std::uint32_t rails)
    : device_(device),
      number_(number),
      receives_(receives_of(rails)),
      pair_(nullptr, device.api().destroy_qp) {}

Status Queue::open() {
  for (const std::uint32_t inline_bytes : kInlineSizes) {
    auto wanted = make_cleared<ibv_qp_init_attr>();
    wanted.send_cq = wanted.recv_cq = device_.completions();
    wanted.qp_type = IBV_QPT_RC;
    wanted.cap.max_send_wr = kSends;
    wanted.cap.max_recv_wr = receives_;
    wanted.cap.max_send_sge = kPiecesMax;
    wanted.cap.max_recv_sge = 1;
    wanted.cap.max_inline_data = inline_bytes;
    pair_.reset(device_.api().create_qp(device_.domain(), &wanted));
    if (pair_ != nullptr) {
      inline_max_ = std::min(wanted.cap.max_inline_data, 1024u);
      break;
    }
    if (errno == ENOMEM || errno == EAGAIN) break;
  }
  if (pair_ == nullptr) return device_.refused("cannot make a queue pair", errno);
  std::random_device random;
  first_packet_ = random() & 0xff'ffff;
  if (Status status = initialize(); !status.ok()) return status;
  if (!post_receives(receives_)) return device_.refused("cannot post receives", error_);
  return {};
}

Status Queue::initialize() {
  ibv_qp_attr wanted = attributes(IBV_QPS_INIT);
  wanted.port_num = static_cast<std::uint8_t>(device_.port().port);
  wanted.qp_access_flags = IBV_ACCESS_REMOTE_WRITE;
  const int mask = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS;
  const int error = device_.api().modify_qp(pair_.get(), &wanted, mask);
  return error == 0 ? Status() : device_.refused("cannot initialize a queue pair", error);
}

PeerAddress Queue::address() const {
  PeerAddress own;
  own.pair_number = pair_->qp_num;
  own.packet_number = first_packet_;
  own.lid = device_.port_facts().lid;
  own.mtu = static_cast<std::uint8_t>(device_.port_facts().active_mtu);
  own.link_layer = device_.port_facts().link_layer;
  std::memcpy(own.gid, device_.gid().raw, sizeof(own.gid));
  return own;
}

Status Queue::connect(const PeerAddress& peer, const std::string& peer_name) {
  peer_area_ = peer.area;
  peer_key_ = peer.rkey;
  ibv_qp_attr ready = attributes(IBV_QPS_RTR);
  ready.path_mtu = static_cast<ibv_mtu>(
      std::min<std::uint8_t>(peer.mtu, static_cast<std::uint8_t>(device_.port_facts().active_mtu)));
  ready.dest_qp_num = peer.pair_number;
  ready.rq_psn = peer.packet_number;
  ready.max_dest_rd_atomic = 1;
  ready.min_rnr_timer = kNotReadyTimer;
  ready.ah_attr.port_num = static_cast<std::uint8_t>(device_.port().port);
  ready.ah_attr.dlid = peer.lid;
  // The address is the GID on Ethernet and between InfiniBand subnets, the LID within a subnet.
  const bool one_subnet = peer.link_layer == IBV_LINK_LAYER_INFINIBAND && peer.lid != 0 &&
                          std::memcmp(peer.gid, device_.gid().raw, 8) == 0;
  ready.ah_attr.is_global = one_subnet ? 0 : 1;
  std::memcpy(ready.ah_attr.grh.dgid.raw, peer.gid, sizeof(peer.gid));
  ready.ah_attr.grh.sgid_index = static_cast<std::uint8_t>(device_.port().gid_index);
  ready.ah_attr.grh.hop_limit = 64;
  int mask = IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
             IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER;
  int error = device_.api().modify_qp(pair_.get(), &ready, mask);
  if (error != 0) return device_.refused("cannot reach " + peer_name, error);

  ibv_qp_attr sending = attributes(IBV_QPS_RTS);
  sending.timeout = kAckTimeout;
  sending.retry_cnt = kRetries;
  sending.rnr_retry = kRetries;
  sending.sq_psn = first_packet_;
  sending.max_rd_atomic = 1;
  mask = IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN |
         IBV_QP_MAX_QP_RD_ATOMIC;
  error = device_.api().modify_qp(pair_.get(), &sending, mask);
  return error == 0 ? Status() : device_.refused("cannot connect to " + peer_name, error);
}

std::uint64_t Queue::send_last(Immediate immediate) {
  (void)chain(nullptr, {}, immediate, true);
  return posted_;
}

bool Queue::is_copied(std::span<const Piece> pieces) const {
  std::uint32_t bytes = 0;
  for (const Piece& piece : pieces) {
    if (piece.by_device) return false;
    bytes += piece.bytes;
  }
  return bytes <= inline_max_;
}

// Skips pieces without bytes, which have no memory.
ibv_send_wr& Queue::append(std::span<const Piece> pieces) {
  ibv_send_wr& request = requests_[chained_];
  auto& memory = memory_[chained_];
  PYCOLL_ASSERT(pieces.size() <= memory.size(), "%zu pieces of a message", pieces.size());
  if (chained_ != 0) requests_[chained_ - 1].next = &request;
  ++chained_;
  request = {};
  request.sg_list = memory.data();
  for (const Piece& piece : pieces) {
    if (piece.bytes == 0) continue;
    memory[static_cast<std::size_t>(request.num_sge++)] = {
        reinterpret_cast<std::uint64_t>(piece.data), piece.bytes, piece.key};
  }
  if (request.num_sge != 0 && is_copied(pieces)) request.send_flags = IBV_SEND_INLINE;
  const Piece first = pieces.empty() ? Piece{} : pieces.front();
  const Target to = first.target.value_or(Target{peer_area_ + first.offset, peer_key_});
  request.wr.rdma.remote_addr = to.address;
  request.wr.rdma.rkey = to.key;
  // Set for unsignaled requests too, because every failed request raises a completion.
  request.wr_id = static_cast<std::uint64_t>(number_) << 32 | static_cast<std::uint32_t>(++posted_);
  return request;
}

std::uint64_t Queue::chain(const Piece* payload, std::span<const Piece> pieces, Immediate immediate,
                           bool signaled) {
  PYCOLL_ASSERT(has_space(), "%llu requests under way",
                static_cast<unsigned long long>(posted_ - completed_));
  if (chained_ + kRequestsPerSend > kChain) ring();
  const std::uint64_t before = posted_;
  bool reads = !is_copied(pieces);
  if (payload != nullptr) {
    const std::span<const Piece> ahead(payload, 1);
    append(ahead).opcode = IBV_WR_RDMA_WRITE;
    reads |= !is_copied(ahead);
  }
  ibv_send_wr& end = append(pieces);
  end.opcode = IBV_WR_RDMA_WRITE_WITH_IMM;
  end.imm_data = htonl(immediate.bits());
  unsignaled_ += static_cast<std::uint32_t>(posted_ - before);
  if (reads || signaled || unsignaled_ >= kSignalEvery || !device_.trouble().empty()) {
    end.send_flags |= IBV_SEND_SIGNALED;
    unsignaled_ = 0;
  }
  return reads ? posted_ : completed_;
}

void Queue::ring() {
  if (chained_ == 0) return;
  chained_ = 0;
  ibv_send_wr* refused = nullptr;
  const int error = pair_->context->ops.post_send(pair_.get(), requests_.data(), &refused);
  if (error != 0 && error_ == 0) error_ = error;
}

void Queue::stop() {
  ibv_qp_attr wanted = attributes(IBV_QPS_ERR);
  // A broken device refuses this; its remaining completions may then never come.
  (void)device_.api().modify_qp(pair_.get(), &wanted, IBV_QP_STATE);
}

bool Queue::post_receives(std::uint32_t count) {
  ibv_recv_wr receive{};
  receive.wr_id = std::uint64_t{1} << 63 | static_cast<std::uint64_t>(number_) << 32;
  std::array<ibv_recv_wr, kReceiveBatch> batch;
  batch.fill(receive);
  for (std::uint32_t posted = 0; posted < count; posted += kReceiveBatch) {
    const std::uint32_t now = std::min(kReceiveBatch, count - posted);
    for (std::uint32_t i = 0; i < now; ++i) batch[i].next = i + 1 < now ? &batch[i + 1] : nullptr;
    ibv_recv_wr* refused = nullptr;
    const int error = pair_->context->ops.post_recv(pair_.get(), batch.data(), &refused);
    if (error != 0) error_ = error;
    if (error != 0) return false;
  }
  return true;
}

void Queue::note_receive() {
  if (++unposted_receives_ < kReceiveBatch) return;
  unposted_receives_ = 0;
  (void)post_receives(kReceiveBatch);
}

}  // namespace pycoll::transport::verbs
