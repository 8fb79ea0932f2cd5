#include "device/driver/streams.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <mutex>
#include <string>
#include <tuple>
#include <utility>

#include "base/bytes.h"

namespace pycoll::device {
Status capture_of(const Gpu& gpu, StreamHandle stream, std::uint64_t* capture) {
  int state = kCaptureNone;
  std::uint64_t id = 0;
  *capture = 0;
  Status status =
      check(gpu.driver(),
            gpu.driver().stream_capture_info(stream, &state, &id, nullptr, nullptr, nullptr),
            "use the stream (while another one is captured, the default stream "
            "cannot be used)");
  if (!status.ok() || state == kCaptureNone) return status;
  if (state == kCaptureActive) {
    *capture = id;
    return Status();
  }
  return invalid_argument(
      "the stream is being captured, and that capture has failed already: end it, and "
      "look for the first call that was not allowed in it");
}

Status check_context(const Gpu& gpu, StreamHandle stream) {
  if (is_legacy(stream) || stream == per_thread_stream()) return Status();  // of any device
  ContextHandle context = nullptr;
  Status status =
      check(gpu.driver(), gpu.driver().stream_context(stream, &context), "find the stream");
  if (!status.ok() || context == gpu.context()) return status;
  return invalid_argument("stream is of another device than this rank's, which is device " +
                          std::to_string(gpu.ordinal()) + ": pass a stream of that device");
}

Status check_uncaptured(const Gpu& gpu, StreamHandle stream) {
  std::uint64_t capture = 0;
  Status status = check_context(gpu, stream);
  if (status.ok()) status = capture_of(gpu, stream, &capture);
  if (!status.ok() || capture == 0) return status;
  return invalid_argument(
      "the stream is being captured, but the ranks' devices have not met yet, so that the host "
      "carries messages, which cannot be captured: call a collective on device arrays before the "
      "capture begins");
}

namespace {

Status launch_copy(const Gpu& gpu, Copy copy, StreamHandle stream) {
  if (copy.count == 0) return Status();
  const std::uint64_t wanted = div_ceil(copy.count, kThreadsMax);
  copy.blocks = static_cast<std::uint32_t>(std::min<std::uint64_t>(wanted, gpu.blocks_max()));
  void* parameters[] = {&copy};
  return check(
      gpu.driver(),
      gpu.launch(Gpu::Launch::kPlain, gpu.copier(), copy.blocks, kThreadsMax, stream, parameters),
      "launch a copy of an array that is not contiguous");
}

// Few warps are spread over the multiprocessors, each of which runs blocks of its own. `Group` is
// Codings or SparseCodings.
template <typename Group>
Status launch_codings(const Gpu& gpu, FunctionHandle kernel, Group& codings, StreamHandle stream) {
  std::uint64_t warps = 0;
  for (std::uint32_t at = 0; at < codings.count; ++at) warps += warps_of(codings.each[at]);
  if (warps == 0) return Status();
  codings.blocks = static_cast<std::uint32_t>(std::min<std::uint64_t>(warps, gpu.coder_blocks()));
  const std::uint64_t wanted = div_ceil(warps, codings.blocks) * kWarp;
  const auto threads = static_cast<std::uint32_t>(std::min<std::uint64_t>(wanted, kCodingThreads));
  void* parameters[] = {&codings};
  return check(gpu.driver(),
               gpu.launch(Gpu::Launch::kPlain, kernel, codings.blocks, threads, stream, parameters),
               "launch the kernel of a codec");
}

bool alike(const Coding& one, const Coding& other) { return one.step == other.step; }
bool alike(const SparseCoding& one, const SparseCoding& other) {
  return one.step == other.step && one.phase == other.phase;
}

// Whether the step, if it is a coding of the group's kind, may run in one launch with the group.
template <typename Group, typename Kind>
bool joins(const Group& codings, const Kind* coding) {
  return coding != nullptr && codings.count != 0 && codings.count < std::size(codings.each) &&
         alike(codings.each[0], *coding);
}

}  // namespace

// Neighbouring codings of one kind and phase share launches.
Status launch_steps(const Gpu& gpu, const std::vector<LocalStep>& steps, StreamHandle stream,
                    Control* control) {
  Status status;
  if (steps.empty()) return status;
  Codings codings{};
  SparseCodings sparse{};
  sparse.control = control;
  const auto flush = [&] {
    if (status.ok()) status = launch_codings(gpu, gpu.coder(), codings, stream);
    if (status.ok()) status = launch_codings(gpu, gpu.sparse_coder(), sparse, stream);
    codings.count = sparse.count = 0;
  };
  for (const LocalStep& step : steps) {
    const auto* coding = std::get_if<Coding>(&step);
    const auto* places = std::get_if<SparseCoding>(&step);
    if (!joins(codings, coding) && !joins(sparse, places)) flush();
    if (!status.ok()) return status;
    if (coding != nullptr) {
      codings.each[codings.count++] = *coding;
    } else if (places != nullptr) {
      sparse.each[sparse.count++] = *places;
    } else {
      status = launch_copy(gpu, std::get<Copy>(step), stream);
    }
  }
  flush();
  return status;
}

namespace {

// The rank that uses a stream, by GPU, communicator and stream.
struct Streams {
  std::mutex mutex;
  std::map<std::tuple<const Gpu*, std::uint64_t, StreamHandle>, std::uint32_t> ranks;
};
Streams& streams_here() {
  static Streams* const all = new Streams;
  return *all;
}

}  // namespace

Status refuse_default_stream(std::uint32_t one, std::uint32_t other) {
  return invalid_argument(
      "ranks " + std::to_string(one) + " and " + std::to_string(other) +
      " are threads on one device, and this call's stream is the default one, which "
      "never runs at the same time as other streams: give each thread a stream of its own");
}

Status OwnStreams::enter(StreamHandle stream) {
  Status status = check_context(gpu_, stream);
  if (!status.ok() || stream == per_thread_stream()) return status;
  if (is_legacy(stream)) stream = nullptr;
  Streams& all = streams_here();
  const std::lock_guard<std::mutex> lock(all.mutex);
  for (auto one = all.ranks.lower_bound({&gpu_, group_, nullptr}); one != all.ranks.end(); ++one) {
    const auto& [gpu, group, known] = one->first;
    if (gpu != &gpu_ || group != group_) break;
    if (one->second == rank_) continue;
    if (stream == nullptr || known == nullptr) return refuse_default_stream(rank_, one->second);
    if (known != stream) continue;
    return invalid_argument(
        "ranks " + std::to_string(rank_) + " and " + std::to_string(one->second) +
        " use the same stream, where one would wait for the other for ever: give each "
        "thread a stream of its own");
  }
  all.ranks.try_emplace({&gpu_, group_, stream}, rank_);
  return status;
}

void OwnStreams::forget() {
  Streams& all = streams_here();
  const std::lock_guard<std::mutex> lock(all.mutex);
  std::erase_if(all.ranks, [this](const auto& one) {
    const auto& [gpu, group, known] = one.first;
    return gpu == &gpu_ && group == group_ && one.second == rank_;
  });
}

}  // namespace pycoll::device
