#include "device/programs.h"

#include <algorithm>
#include <bit>
#include <cstdint>
#include <span>
#include <utility>

#include "base/bytes.h"
#include "plan/layout.h"

namespace pycoll::device {
namespace {

// Up to this size Pattern replaces the fences of Simple. It costs a comparison of every word that
// is sent, and a store to the receiver's own memory for every 16 bytes that arrive. The bound has
// not been tuned on a device. With LL it would be half of this, for as many bytes on the wire.
// LL128 is never chosen, since no driver tells where lines arrive whole.
constexpr std::uint64_t kPatternBytesMax = 128 * 1024;

std::uint64_t bytes_of(const executor::CollectiveRequest& request) {
  std::uint64_t count = 0;
  for (const std::uint64_t one : request.counts) count += one;
  return count * item_bytes(request.descriptor.dtype);
}

// Everything that a program depends on.
std::string key_of(const executor::CollectiveRequest& request) {
  const auto plan = reinterpret_cast<std::uintptr_t>(request.plan.get());
  std::string key(reinterpret_cast<const char*>(&plan), sizeof(plan));
  key.append(reinterpret_cast<const char*>(&request.descriptor), sizeof(request.descriptor));
  key.append(reinterpret_cast<const char*>(request.counts.data()),
             request.counts.size() * sizeof(request.counts[0]));
  key.push_back(request.parts.empty() ? 'o' : 'l');  // lists run another kernel
  return key;
}

// Enough threads for one unit each of the longest segment, in whole warps.
std::uint32_t threads_for(const Binding& binding) {
  const Program& program = binding.program;
  const std::uint64_t segment = std::min<std::uint64_t>(binding.longest, program.segment_length);
  const std::uint64_t units = div_ceil(segment * program.item_bytes, kPackBytes);
  const std::uint64_t wanted = round_up(std::max<std::uint64_t>(units, 1), kWarp);
  return static_cast<std::uint32_t>(std::min<std::uint64_t>(wanted, kThreadsMax));
}

}  // namespace

Programs::Programs(std::shared_ptr<const Gpu> gpu, const Channels& channels,
                   const Registry& registry, Upload& upload, const Words& words, Address words_at,
                   std::size_t max)
    : gpu_(std::move(gpu)),
      channels_(channels),
      registry_(registry),
      upload_(upload),
      words_(words),
      words_at_(words_at),
      pieces_(gpu_, Reserved::Kind::kDevice, "plans"),
      max_(max) {}

Programs::~Programs() = default;

Status Programs::start() {
  const std::size_t bytes = words_.beats.size() * sizeof(std::uint32_t);
  Status status = Reserved::take(gpu_, Reserved::Kind::kDevice, bytes, "counters", &runs_);
  return status.ok() ? upload_.clear(runs_.address(), bytes) : status;
}

void Programs::abandon() {
  for (Reserved& one : scratch_) one.abandon();
  runs_.abandon();
}

std::string Programs::name(std::uint32_t label) const {
  const std::lock_guard<std::mutex> lock(naming_);
  return label < names_.size() ? names_[label] : "device operation";
}

std::uint32_t Programs::enter_name(const Job& job) {
  std::string text =
      "device " + (job.messages != nullptr ? to_text(*job.messages)
                                           : transport::to_text(job.request->descriptor));
  const std::lock_guard<std::mutex> lock(naming_);
  const auto found = std::find(names_.begin(), names_.end(), text);
  const auto label = static_cast<std::uint32_t>(found - names_.begin());
  if (found == names_.end()) names_.push_back(std::move(text));
  return label;
}

Status Programs::find(const Job& job, const Destination& where, LoadedProgram** found) {
  std::string key = job.messages != nullptr ? key_of(*job.messages) : key_of(*job.request);
  // Programs bound before the first registration know no table.
  if (registry_.is_used()) key.push_back('r');
  const auto known = known_.find(key);
  Status status;
  if (known != known_.end()) {
    *found = &known->second;
  } else {
    drop_past();
    if (known_.size() >= max_) forget_uncaptured(where.behind());
    LoadedProgram made;
    status = load(job, &made);
    if (!status.ok()) return status;
    *found = &(known_[key] = made);
  }
  // A graph may be launched in any stream, and that stream would not wait for the copy.
  return where.captured ? upload_.finish() : upload_.before(where.stream);
}

void Programs::forget_uncaptured(const Past& past) {
  Retired retired{past, {}};
  std::erase_if(known_, [&](const auto& one) {
    const LoadedProgram& loaded = one.second;
    if (loaded.captured) return false;
    retired.pieces.emplace_back(loaded.memory, loaded.bytes);
    return true;
  });
  retired_.push_back(std::move(retired));
}

void Programs::drop_past() {
  while (!retired_.empty() && retired_.front().past()) {
    for (const auto& [address, bytes] : retired_.front().pieces) {
      pieces_.give_back({address}, bytes);
    }
    retired_.pop_front();
  }
}

Status Programs::choose(const executor::CollectiveRequest& request, std::uint32_t lanes,
                        Manner* manner) const {
  const std::uint32_t space = channels_.blocks() / lanes;
  if (space == 0) {
    return Status::error(
        Code::kInvalidArgument,
        "this algorithm needs " + std::to_string(lanes) + " blocks that run at once, but " +
            std::to_string(channels_.sharing()) + " ranks share the device, which leaves " +
            std::to_string(channels_.blocks()) + ": choose algorithm=\"ring\" or fewer ranks");
  }
  const std::uint64_t bytes = bytes_of(request);
  manner->protocol =
      channels_.only().value_or(bytes <= kPatternBytesMax ? Protocol::kPattern : Protocol::kSimple);
  if (channels_.some_proxied()) manner->protocol = Protocol::kSimple;
  const std::uint64_t per_share =
      manner->protocol == Protocol::kSimple
          ? kBytesPerShare
          : channels_.shape().segment_bytes[static_cast<std::size_t>(manner->protocol)];
  const std::uint64_t wanted = std::max<std::uint64_t>(1, div_ceil(bytes, per_share));
  manner->shares = static_cast<std::uint32_t>(
      std::min<std::uint64_t>(wanted, std::min(space, channels_.shape().shares)));
  manner->ordered = lanes > 1;
  manner->direct_writes = registry_.is_used();
  return Status();
}

Status Programs::bind(const Job& job, Manner* manner, Binding* binding) const {
  const Shape& shape = channels_.shape();
  if (job.messages != nullptr) {
    const std::uint32_t shares = message_shares(shape, channels_.blocks());
    return device::bind(*job.messages, *job.request, shape, shares, binding);
  }
  Status status = choose(*job.request, job.lanes, manner);
  return status.ok() ? device::bind(*job.request, shape, *manner, binding) : status;
}

Status Programs::load(const Job& job, LoadedProgram* made) {
  const executor::CollectiveRequest& request = *job.request;
  Manner manner;
  Binding binding;
  Status status = bind(job, &manner, &binding);
  if (status.ok()) status = need_scratch(binding.scratch_bytes);
  if (!status.ok()) return status;
  const bool reduces = plan::reduces(request.descriptor.collective);
  made->plan = request.plan;
  made->program = binding.program;
  const KernelKind kind = request.parts.empty()
                              ? kind_of(reduces, request.descriptor.dtype, request.descriptor.op)
                              : KernelKind::kList;
  made->kernel = gpu_->kernel(manner.protocol, kind);
  made->blocks = binding.program.lane_count * binding.program.shares;
  made->threads = threads_for(binding);
  return upload_program(job, binding, made);
}

Status Programs::need_scratch(std::uint64_t bytes) {
  if (bytes == 0 || (!scratch_.empty() && scratch_.back().bytes() >= bytes)) return Status();
  Reserved more;
  Status status = Reserved::take(gpu_, Reserved::Kind::kDevice, bytes, "scratch", &more);
  if (status.ok()) scratch_.push_back(std::move(more));
  return status;
}

Status Programs::upload_program(const Job& job, const Binding& binding, LoadedProgram* made) {
  const auto rows = std::as_bytes(job.request->plan->plan().rows);
  const auto share_offsets = std::as_bytes(std::span(binding.share_offsets));
  std::vector<Address> ports;
  ports.reserve(binding.ports.size());
  for (const std::uint32_t port : binding.ports) ports.push_back(channels_.port(port));
  const auto table = std::as_bytes(std::span(ports));
  const auto chains = std::as_bytes(std::span(binding.chains));
  const auto direct_writes = std::as_bytes(std::span(binding.direct_writes));
  const auto uses = std::as_bytes(std::span(binding.uses));
  std::vector<std::byte> all;
  for (const auto part : {rows, share_offsets, table, chains, direct_writes, uses}) {
    all.insert(all.end(), part.begin(), part.end());
  }
  made->bytes = all.size();
  Pieces::Piece piece;
  Status status = pieces_.take(all.size(), &piece);
  made->memory = piece.address;
  if (status.ok()) status = upload_.send(made->memory, all.data(), all.size());
  if (!status.ok()) return status;

  const auto at = [](Address address) { return std::bit_cast<std::byte*>(address); };
  Program& program = made->program;
  Address next = made->memory;
  const auto behind = [&](std::size_t bytes) { return at(std::exchange(next, next + bytes)); };
  program.rows = reinterpret_cast<const plan::Row*>(behind(rows.size()));
  program.share_offsets = reinterpret_cast<const ShareOffsets*>(behind(share_offsets.size()));
  program.ports = reinterpret_cast<Port* const*>(behind(table.size()));
  program.chains = chains.empty() ? nullptr : reinterpret_cast<const Chain*>(behind(chains.size()));
  if (!direct_writes.empty()) {
    // Chains belong to joined lanes, direct writes to Simple: never both, so these are aligned.
    program.direct_writes = reinterpret_cast<const DirectWrite*>(behind(direct_writes.size()));
    program.uses = reinterpret_cast<const std::uint8_t*>(behind(uses.size()));
    program.registered = registry_.table();
  }
  program.scratch = scratch_.empty() ? nullptr : scratch_.back().pointer<std::byte>();
  // The words have the same layout for kernels and for the host.
  const auto* begin = reinterpret_cast<const std::byte*>(words_.control);
  const auto shared = [&](const void* word) {
    return at(words_at_ + static_cast<std::size_t>(static_cast<const std::byte*>(word) - begin));
  };
  program.control = reinterpret_cast<Control*>(shared(words_.control));
  program.waits = reinterpret_cast<std::uint32_t*>(shared(words_.waits.data()));
  program.beats = reinterpret_cast<std::uint32_t*>(shared(words_.beats.data()));
  program.runs = runs_.pointer<std::uint32_t>();
  program.label = enter_name(job);
  return Status();
}

}  // namespace pycoll::device
