// The least that an all_reduce of two ranks costs on this machine: two processes with nothing but
// slots of shared memory between them. Each copies its array into its slots, segment by segment,
// and adds what it finds in the other's. Nobody chooses, checks, names or waits for anything else.
//
//   bare_exchange BYTES
//
// For every line on its standard input it prints the median of some exchanges in microseconds, once
// with slots filled by ordinary stores and once with such as go past the caches:
//
//   ordinary 584.2 streamed 92.7
//
// It exits with 1 if a sum is wrong. Linux, x86-64.
#include <immintrin.h>
#include <sched.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <new>
#include <span>
#include <string>
#include <vector>

namespace {

constexpr std::size_t kSegmentBytes = 64 * 1024;
constexpr long kSlots = 4;
// Segments that are under way before the first one is expected.
constexpr long kAhead = 2;
// Exchanges of one sample last about so long, but for the first, which warms caches.
constexpr double kSampleSeconds = 0.02;
constexpr double kUsualRate = 5e9;  // bytes per second
constexpr int kExchangesMin = 3, kExchangesMax = 500;

struct alignas(128) Counter {
  std::atomic<long> value{0};

  void advance() { value.fetch_add(1, std::memory_order_release); }
  void await(long wanted) const {
    while (value.load(std::memory_order_acquire) < wanted) _mm_pause();
  }
};

struct Shared {
  Counter arrived[2], filled[2], emptied[2];
  alignas(4096) std::byte slots[2][kSlots][kSegmentBytes];
};

using Fill = void (*)(std::byte* slot, const std::byte* from, std::size_t bytes);

void store(std::byte* slot, const std::byte* from, std::size_t bytes) {
  std::memcpy(slot, from, bytes);
}

void stream(std::byte* slot, const std::byte* from, std::size_t bytes) {
  for (std::size_t at = 0; at < bytes; at += 32) {
    const __m256i piece = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + at));
    _mm256_stream_si256(reinterpret_cast<__m256i*>(slot + at), piece);
  }
  _mm_sfence();
}

// Of huge pages, if there are any; never given back.
std::span<float> allocate(std::size_t bytes) {
  constexpr std::size_t kHugePage = std::size_t{2} << 20;
  const std::size_t whole = (bytes + kHugePage - 1) / kHugePage * kHugePage;
  void* memory = std::aligned_alloc(kHugePage, whole);
  if (memory == nullptr) throw std::bad_alloc();
  (void)madvise(memory, whole, MADV_HUGEPAGE);
  return {static_cast<float*>(memory), bytes / sizeof(float)};
}

class Rank {
 public:
  Rank(Shared* shared, int rank, std::size_t bytes)
      : shared_(*shared), rank_(rank), own_(allocate(bytes)) {
    for (std::size_t i = 0; i < own_.size(); ++i) own_[i] = begins(rank, i);
  }

  // One of both meets the other here.
  void meet() {
    shared_.arrived[rank_].advance();
    shared_.arrived[1 - rank_].await(++meetings_);
  }

  void exchange(Fill fill) {
    const long segments = (bytes() + kSegmentBytes - 1) / kSegmentBytes;
    long sent = 0;
    for (long segment = 0; segment < segments; ++segment) {
      for (; sent < std::min(segments, segment + kAhead); ++sent) send(sent, fill);
      receive(segment);
    }
  }

  // Of the first exchange.
  bool is_right() const {
    for (std::size_t i = 0; i < own_.size(); ++i) {
      if (own_[i] != begins(0, i) + begins(1, i)) return false;
    }
    return true;
  }

 private:
  static float begins(int rank, std::size_t i) {
    return static_cast<float>(i % 1000) + static_cast<float>(rank);
  }

  std::size_t bytes() const { return own_.size() * sizeof(float); }
  std::size_t length_of(long segment) const {
    return std::min(kSegmentBytes, bytes() - segment * kSegmentBytes);
  }

  void send(long segment, Fill fill) {
    shared_.emptied[rank_].await(sent_ - kSlots + 1);
    const auto* from = reinterpret_cast<const std::byte*>(own_.data()) + segment * kSegmentBytes;
    fill(shared_.slots[rank_][sent_++ % kSlots], from, length_of(segment));
    shared_.filled[rank_].advance();
  }

  void receive(long segment) {
    shared_.filled[1 - rank_].await(received_ + 1);
    const auto* other =
        reinterpret_cast<const float*>(shared_.slots[1 - rank_][received_++ % kSlots]);
    float* own = own_.data() + segment * (kSegmentBytes / sizeof(float));
    const std::size_t count = length_of(segment) / sizeof(float);
    for (std::size_t i = 0; i < count; ++i) own[i] += other[i];
    shared_.emptied[1 - rank_].advance();
  }

  Shared& shared_;
  const int rank_;
  const std::span<float> own_;
  long meetings_ = 0, sent_ = 0, received_ = 0;
};

// Median seconds; both ranks do the same number of exchanges.
double sample(Rank& rank, Fill fill, int exchanges) {
  using Clock = std::chrono::steady_clock;
  std::vector<double> times;
  for (int i = 0; i <= exchanges; ++i) {
    rank.meet();
    const auto begin = Clock::now();
    rank.exchange(fill);
    if (i != 0) times.push_back(std::chrono::duration<double>(Clock::now() - begin).count());
  }
  std::nth_element(times.begin(), times.begin() + times.size() / 2, times.end());
  return times[times.size() / 2];
}

void pin(int rank) {
  cpu_set_t all, one;
  CPU_ZERO(&one);
  if (sched_getaffinity(0, sizeof(all), &all) != 0) return;
  for (int core = 0, seen = 0; core < CPU_SETSIZE; ++core) {
    if (CPU_ISSET(core, &all) && seen++ == rank) CPU_SET(core, &one);
  }
  (void)sched_setaffinity(0, sizeof(one), &one);
}

// Rank 0 is told by a line on its standard input, and tells rank 1: who is not asked sleeps, so
// that nobody spins while others are measured.
int serve(Rank& rank, int number, int exchanges, const int orders[2]) {
  for (std::string line; number == 1 || std::getline(std::cin, line);) {
    char order = 0;
    if (number == 1 && read(orders[0], &order, 1) != 1) return 0;
    if (number == 0 && write(orders[1], &order, 1) != 1) return 2;
    const double ordinary = sample(rank, store, exchanges);
    const double streamed = sample(rank, stream, exchanges);
    if (number == 0) std::printf("ordinary %.4g streamed %.4g\n", ordinary * 1e6, streamed * 1e6);
    (void)std::fflush(stdout);
  }
  return 0;
}

int usage() {
  std::fprintf(stderr, "usage: bare_exchange BYTES\n");
  return 2;
}

}  // namespace

int main(int argc, char** argv) {
  const std::size_t bytes = argc == 2 ? std::strtoull(argv[1], nullptr, 10) / 32 * 32 : 0;
  if (bytes == 0) return usage();
  void* memory =
      mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  int orders[2];
  if (memory == MAP_FAILED || pipe(orders) != 0) {
    std::perror("bare_exchange");
    return 2;
  }
  auto* shared = new (memory) Shared;
  const int number = fork() == 0 ? 1 : 0;
  if (number == 1) close(orders[1]);
  pin(number);
  Rank rank(shared, number, bytes);
  rank.meet();
  rank.exchange(stream);
  if (!rank.is_right()) {
    std::fprintf(stderr, "bare_exchange: a wrong sum\n");
    return 1;
  }
  const double expected = kSampleSeconds / (static_cast<double>(bytes) / kUsualRate);
  return serve(rank, number, std::clamp(static_cast<int>(expected), kExchangesMin, kExchangesMax),
               orders);
}
