#include "tests/cpp/transport/verbs/fake/verbs_fake_network.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>

#include "tests/cpp/support/check.h"

namespace pycoll::testing {
namespace {

FakeNetwork* current_network = nullptr;

// Messages of a pair whose packets may be on the way at once.
constexpr std::size_t kWindow = 4;
// A peer that does not answer for so long is given up.
constexpr Nanoseconds kUnanswered = 30'000'000;

Nanoseconds now() {
  SteadyClock clock;
  return clock.now();
}

}  // namespace

FakeNetwork& FakeNetwork::current() {
  CHECK(current_network != nullptr, "no fake network");
  return *current_network;
}

FakeNetwork::FakeNetwork(const FakeOptions& chosen) : options(chosen), prng_(chosen.seed) {
  CHECK(current_network == nullptr, "one fake network at a time");
  current_network = this;
  thread_ = std::thread([this] { run(); });
}

FakeNetwork::~FakeNetwork() {
  {
    const auto held = lock();
    CHECK(handles == 0, "%d handles were not freed", handles);
    over_ = true;
  }
  work_.notify_one();
  thread_.join();
  current_network = nullptr;
}

void FakeNetwork::run() {
  auto held = lock();
  while (!over_) {
    bool moved = false;
    for (int i = 0; i < 32; ++i) moved |= step();
    if (!moved) {
      work_.wait_for(held, std::chrono::milliseconds(1));
    } else if (!options.orderly && prng_.chance(1, 64)) {
      const std::chrono::microseconds pause(prng_.below(60));
      held.unlock();
      std::this_thread::sleep_for(pause);
      held.lock();
    } else {
      held.unlock();  // others want it too
      held.lock();
    }
  }
}

bool FakeNetwork::step() {
  if (pairs.empty()) return false;
  if (!options.orderly && prng_.chance(1, 256)) {
    auto any = pairs.begin();
    std::advance(any, static_cast<long>(prng_.below(pairs.size())));
    still_ = any->second->device;
  }
  return advance_any(still_) || advance_any(-1);
}

// One packet or one completion of a pair chosen by chance, or of the next one that has any.
bool FakeNetwork::advance_any(int except) {
  auto at = pairs.begin();
  std::advance(at, static_cast<long>(prng_.below(pairs.size())));
  for (std::size_t i = 0; i < pairs.size(); ++i) {
    if (at->second->device != except && advance(*at->second)) return true;
    if (++at == pairs.end()) at = pairs.begin();
  }
  return false;
}

bool FakeNetwork::advance(FakePair& pair) {
  const bool holds = holding.count(pair.device) != 0 && pair.handle.state != IBV_QPS_ERR;
  if (!holds && !pair.late.empty() &&
      (options.orderly || pair.sends.empty() || prng_.chance(1, 8))) {
    tell(*reinterpret_cast<FakeCompletions*>(pair.handle.send_cq), pair.late.front());
    pair.late.pop_front();
    return true;
  }
  if (pair.handle.state != IBV_QPS_RTS || pair.sends.empty()) return false;
  if (broken.count(pair.device) != 0) {
    fail(pair, IBV_WC_LOC_QP_OP_ERR);
    return true;
  }
  return stalled.count(pair.device) == 0 && arrive(pair);
}

bool FakeNetwork::arrive(FakePair& pair) {
  const auto found = pairs.find(pair.peer);
  FakePair* peer = found == pairs.end() ? nullptr : found->second;
  const bool answers = peer != nullptr && !is_cut(pair) && !is_cut(*peer) &&
                       peer->peer == pair.handle.qp_num &&
                       (peer->handle.state == IBV_QPS_RTR || peer->handle.state == IBV_QPS_RTS);
  if (!answers) {
    if (pair.unanswered_since == 0) pair.unanswered_since = now();
    if (now() - pair.unanswered_since < kUnanswered) return false;
    fail(pair, IBV_WC_RETRY_EXC_ERR);
    return true;
  }
  pair.unanswered_since = 0;
  if (!pair.sends.front().packets.empty()) {
    place(pair, *peer);
  } else {
    finish(pair, *peer);
  }
  return true;
}

namespace {

// As memory is now: the device reads it when the packet leaves.
std::vector<std::byte> packet_of(const FakeRequest& request, std::uint32_t offset,
                                 std::uint32_t bytes) {
  if (request.sources.empty()) {
    const auto begin = request.copied.begin() + offset;
    return {begin, begin + bytes};
  }
  std::vector<std::byte> packet;
  std::uint32_t skip = offset;
  for (const FakeSource& source : request.sources) {
    const std::uint32_t from = std::min(skip, source.bytes);
    const auto here = std::min<std::size_t>(source.bytes - from, bytes - packet.size());
    packet.insert(packet.end(), source.data + from, source.data + from + here);
    skip -= from;
  }
  return packet;
}

}  // namespace

// Any packet of the messages in the window; their completions still come in order.
void FakeNetwork::place(FakePair& pair, FakePair& peer) {
  std::size_t which = 0;
  if (!options.orderly) {
    which = prng_.below(std::min(kWindow, pair.sends.size()));
    while (pair.sends[which].packets.empty()) --which;  // the first has some
  }
  FakeRequest& request = pair.sends[which];
  const std::size_t index = options.orderly ? 0 : prng_.below(request.packets.size());
  if (which != 0 || index != 0) ++disordered;
  const std::uint32_t offset = request.packets[index] * kPacketBytes;
  request.packets.erase(request.packets.begin() + static_cast<long>(index));
  const std::uint32_t bytes = std::min(kPacketBytes, request.bytes - offset);
  const FakeRegion* target = region(request.key, request.target, request.bytes);
  CHECK(target != nullptr && (target->access & IBV_ACCESS_REMOTE_WRITE) != 0 &&
            target->handle.rkey == request.key && target->handle.context == peer.handle.context,
        "%u bytes written where no key allows it", request.bytes);
  const std::vector<std::byte> packet = packet_of(request, offset, bytes);
  std::byte* to = target->at(request.target) + offset;
  if (target->is_of_device()) directly_written_bytes += bytes;
  if (target->device >= 0) return cards->write(target->device, to, packet.data(), bytes);
  std::memcpy(to, packet.data(), bytes);
}

void FakeNetwork::finish(FakePair& pair, FakePair& peer) {
  FakeRequest& request = pair.sends.front();
  ++messages;
  if (request.immediate) {
    CHECK(!peer.receives.empty(), "a message found no receive posted on pair %u",
          peer.handle.qp_num);
    ibv_wc arrived{};
    arrived.wr_id = peer.receives.front();
    peer.receives.pop_front();
    arrived.opcode = IBV_WC_RECV_RDMA_WITH_IMM;
    arrived.byte_len = request.bytes;
    arrived.imm_data = request.immediate_bits;
    arrived.wc_flags = IBV_WC_WITH_IMM;
    arrived.qp_num = peer.handle.qp_num;
    tell(*reinterpret_cast<FakeCompletions*>(peer.handle.recv_cq), arrived);
  }
  // The device forgets requests that do not tell with the next one that does.
  if (request.tells) pair.late.push_back(request.completion);
  pair.sends.pop_front();
}

void FakeNetwork::fail(FakePair& pair, ibv_wc_status status) {
  pair.handle.state = IBV_QPS_ERR;
  for (FakeRequest& request : pair.sends) {
    request.completion.status = status;
    pair.late.push_back(request.completion);
    status = IBV_WC_WR_FLUSH_ERR;
  }
  pair.sends.clear();
  for (const std::uint64_t id : pair.receives) {
    ibv_wc flushed{};
    flushed.wr_id = id;
    flushed.status = IBV_WC_WR_FLUSH_ERR;
    flushed.qp_num = pair.handle.qp_num;
    pair.late.push_back(flushed);
  }
  pair.receives.clear();
}

void FakeNetwork::tell(FakeCompletions& queue, const ibv_wc& completion) {
  CHECK(queue.waiting.size() < queue.capacity, "a queue of %zu completions overflows",
        queue.capacity);
  queue.waiting.push_back(completion);
  if (!queue.armed) return;
  queue.armed = false;
  const std::uint64_t one = 1;
  CHECK(::write(queue.handle.channel->fd, &one, sizeof(one)) == sizeof(one), "no event");
}

bool FakeNetwork::reads(const ibv_mr& region) const {
  for (const auto& [number, pair] : pairs) {
    for (const FakeRequest& request : pair->sends) {
      for (const FakeSource& source : request.sources) {
        if (source.key == region.lkey) return true;
      }
    }
  }
  return false;
}

const FakeRegion* FakeNetwork::region(std::uint32_t key, std::uint64_t address,
                                      std::size_t bytes) const {
  const auto found = regions.find(key);
  if (found == regions.end()) return nullptr;
  const auto begin = reinterpret_cast<std::uint64_t>(found->second->handle.addr);
  const std::size_t length = found->second->handle.length;
  const bool inside = address >= begin && bytes <= length && address - begin <= length - bytes;
  return inside ? found->second : nullptr;
}

}  // namespace pycoll::testing
