#include "kernels/sparse_codes.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <utility>

#include "base/assert.h"
#include "base/cache.h"
#include "base/copy.h"
#include "kernels/backend.h"
#include "kernels/dispatch.h"

namespace pycoll::kernels {
namespace {

// Values that one call of a kernel examines: few enough for L1.
constexpr std::size_t kPiece = 4096;
// Values in the sample from which largest_values() guesses a bound.
constexpr std::size_t kSample = 8192;
// Of shorter arrays a sample would be a large part.
constexpr std::size_t kSampledMin = 2 * kSample;

constexpr std::uint32_t kInfinity = 0x7f800000u;

// A byte of a gap holds so many bits, and this bit if another byte follows.
constexpr unsigned kGapBits = 7;
constexpr std::uint32_t kMore = 1u << kGapBits;

std::uint32_t magnitude(float value) { return std::bit_cast<std::uint32_t>(value) & 0x7fffffffu; }

// All NaN have one key, the largest.
std::uint32_t key_of(float value) { return std::min(magnitude(value), kInfinity + 1); }

// Arrays may have any alignment.
template <typename T>
T element(const void* array, std::size_t index) {
  T value;
  std::memcpy(&value, static_cast<const std::byte*>(array) + index * sizeof(T), sizeof(T));
  return value;
}

// Whether memory of so many values is evicted before its next use, so that stores bypass caches.
bool streams(std::size_t count) {
  constexpr std::size_t kCoreCaches = 8;
  return count * sizeof(float) >= kCoreCaches * core_cache_bytes();
}

void collect(const SparseInput& input, std::uint32_t bound, Isa isa, SparseCodes* found) {
  PYCOLL_ASSERT(input.count <= kSparseMax, "%zu values have no places of 32 bits", input.count);
  const CollectFunction function = backend_of(isa).collect;
  alignas(64) float made[kPiece];
  std::uint32_t places[kPiece];
  const bool apart = input.sums != nullptr && input.sums != input.rests;
  const bool streamed = apart && streams(input.count);
  for (std::size_t at = 0; at < input.count; at += kPiece) {
    const std::size_t count = std::min(kPiece, input.count - at);
    const float* values = input.values + at;
    const float* rests = input.rests == nullptr ? nullptr : input.rests + at;
    float* sums = input.sums == nullptr || streamed ? made : input.sums + at;
    const std::size_t number = function(places, sums, values, rests, count, bound);
    const float* from = rests == nullptr ? values : sums;
    const std::size_t before = found->places.size();
    found->places.resize(before + number);
    found->values.resize(before + number);
    for (std::size_t i = 0; i < number; ++i) {
      found->places[before + i] = static_cast<std::uint32_t>(at + places[i]);
      found->values[before + i] = element<float>(from, places[i]);
    }
    if (streamed && rests != nullptr) {
      stream_copy(reinterpret_cast<std::byte*>(input.sums + at),
                  reinterpret_cast<const std::byte*>(made), count * sizeof(float));
    }
  }
  if (streamed) stream_fence();
}

// Returns the smallest of the `number` largest keys. Then `*number` is how many keys that equal it
// are among these. Counting by digits does not mispredict branches, as partitions do. Requires:
// 1 <= *number <= keys.size().
std::uint32_t smallest_kept(std::vector<std::uint32_t> keys, std::size_t* number) {
  std::uint32_t found = 0;
  for (const unsigned shift : {20u, 10u, 0u}) {
    const std::uint32_t digits = shift == 20 ? 2048 : 1024;
    std::array<std::size_t, 2048> counts{};
    for (const std::uint32_t key : keys) ++counts[key >> shift & (digits - 1)];
    std::uint32_t digit = digits - 1;
    for (; counts[digit] < *number; --digit) *number -= counts[digit];
    std::size_t kept = 0;
    for (const std::uint32_t key : keys) {
      keys[kept] = key;
      kept += (key >> shift & (digits - 1)) == digit ? 1 : 0;
    }
    keys.resize(kept);
    found |= digit << shift;
  }
  return found;
}

// A bound that a little more than `number` values are likely to reach.
std::uint32_t guess(const SparseInput& input, std::size_t number) {
  if (input.count < kSampledMin || number >= input.count) return 0;
  const std::size_t step = input.count / kSample;
  std::vector<std::uint32_t> keys(kSample);
  std::uint32_t draw = 1;
  for (std::size_t i = 0; i < kSample; ++i) {
    // A place in each of equally long parts, so that no period of the data is met or missed.
    draw = draw * 1664525u + 1013904223u;
    const std::size_t at = i * step + (std::uint64_t{draw} * step >> 32);
    const float value = element<float>(input.values, at);
    keys[i] = key_of(input.rests == nullptr ? value : value + element<float>(input.rests, at));
  }
  const double share = static_cast<double>(number) / static_cast<double>(input.count) * kSample;
  auto wanted = static_cast<std::size_t>(std::ceil(share + 4 * std::sqrt(share) + 4));
  if (wanted >= kSample) return 0;
  return smallest_kept(std::move(keys), &wanted);
}

// Keeps the `number` largest ones of at least so many.
void keep_largest(SparseCodes* found, std::size_t number) {
  const std::size_t all = found->places.size();
  if (number == 0) *found = {};
  if (number == 0 || number == all) return;
  std::vector<std::uint32_t> keys(all);
  std::transform(found->values.begin(), found->values.end(), keys.begin(), key_of);
  std::size_t equal = number;
  const std::uint32_t least = smallest_kept(std::move(keys), &equal);
  std::size_t kept = 0;
  for (std::size_t i = 0; i < all; ++i) {
    const std::uint32_t key = key_of(found->values[i]);
    if (key < least || (key == least && equal == 0)) continue;
    if (key == least) --equal;
    found->places[kept] = found->places[i];
    found->values[kept++] = found->values[i];
  }
  found->places.resize(kept);
  found->values.resize(kept);
}

// Reads codes from the first to the last, and checks that their places ascend below a bound.
class Reader {
 public:
  Reader(const SparseSpan& codes, std::size_t count) : codes_(codes), count_(count) { advance(); }

  bool valid() const { return valid_; }
  // The next place; `count` behind the last one, and where places are not valid.
  std::size_t place() const { return place_; }

  float take() {
    const float value = element<float>(codes_.values, next_ - 1);
    advance();
    return value;
  }

 private:
  void advance() {
    const std::size_t least = next_ == 0 ? 0 : place_ + 1;
    place_ = count_;
    if (next_ == codes_.number) return;
    const std::size_t found = element<std::uint32_t>(codes_.places, next_++);
    valid_ = found >= least && found < count_;
    if (valid_) place_ = found;
  }

  SparseSpan codes_;
  std::size_t count_;
  std::size_t next_ = 0;  // index of the place behind place_
  std::size_t place_ = 0;
  bool valid_ = true;
};

}  // namespace

SparseCodes values_from(const SparseInput& input, float bound, Isa isa) {
  SparseCodes found;
  collect(input, magnitude(bound), isa, &found);
  return found;
}

SparseCodes largest_values(const SparseInput& input, std::size_t number, Isa isa) {
  number = std::min(number, input.count);
  SparseCodes found;
  collect(input, guess(input, number), isa, &found);
  if (found.places.size() < number) {
    found = {};
    const bool added = input.rests != nullptr && input.sums != nullptr;
    collect(added ? SparseInput{.values = input.sums, .count = input.count} : input, 0, isa,
            &found);
  }
  keep_largest(&found, number);
  return found;
}

bool fold_codes(const std::vector<SparseSpan>& codes, std::size_t count, std::uint32_t divisor,
                SparseCodes* result) {
  *result = {};
  std::vector<Reader> readers;
  readers.reserve(codes.size());
  for (const SparseSpan& one : codes) readers.emplace_back(one, count);
  alignas(64) float sums[kPiece];
  std::uint64_t named[kPiece / 64] = {};
  while (true) {
    std::size_t lowest = count;
    for (const Reader& reader : readers) lowest = std::min(lowest, reader.place());
    if (lowest == count) break;
    const std::size_t first = lowest / kPiece * kPiece;
    const std::size_t end = std::min(count, first + kPiece);
    for (std::size_t rank = 0; rank < readers.size(); ++rank) {
      while (readers[rank].place() < end) {
        const std::size_t at = readers[rank].place() - first;
        const float value = readers[rank].take();
        std::uint64_t& word = named[at / 64];
        const std::uint64_t bit = std::uint64_t{1} << at % 64;
        // Ranks before this one have added 0, which turns -0 into 0.
        const float before = (word & bit) != 0 ? sums[at] : 0.0f;
        sums[at] = rank == 0 ? value : before + value;
        word |= bit;
      }
    }
    for (std::size_t i = 0; i < kPiece / 64; ++i) {
      for (std::uint64_t word = std::exchange(named[i], 0); word != 0; word &= word - 1) {
        const std::size_t at = i * 64 + static_cast<std::size_t>(std::countr_zero(word));
        result->places.push_back(static_cast<std::uint32_t>(first + at));
        result->values.push_back(divisor == 0 ? sums[at] : sums[at] / static_cast<float>(divisor));
      }
    }
  }
  return std::all_of(readers.begin(), readers.end(),
                     [](const Reader& reader) { return reader.valid(); });
}

bool spread_codes(const SparseSpan& codes, float* values, std::size_t count) {
  Reader reader(codes, count);
  alignas(64) float made[kPiece];
  const bool streamed = streams(count);
  for (std::size_t first = 0; first < count; first += kPiece) {
    const std::size_t end = std::min(count, first + kPiece);
    std::fill_n(made, end - first, 0.0f);
    while (reader.place() < end) {
      const std::size_t at = reader.place() - first;
      made[at] = reader.take();
    }
    auto* to = reinterpret_cast<std::byte*>(values + first);
    const auto* from = reinterpret_cast<const std::byte*>(made);
    const std::size_t bytes = (end - first) * sizeof(float);
    streamed ? stream_copy(to, from, bytes) : copy_bytes(to, from, bytes);
  }
  if (streamed) stream_fence();
  return reader.valid();
}

bool place_codes(const SparseSpan& codes, float* values, std::size_t count) {
  Reader reader(codes, count);
  while (reader.place() < count) {
    const std::size_t at = reader.place();
    const float value = reader.take();
    std::memcpy(values + at, &value, sizeof(value));
  }
  return reader.valid();
}

std::vector<std::uint8_t> pack_places(const std::byte* places, std::size_t number) {
  std::vector<std::uint8_t> bytes;
  bytes.reserve(number + number / 2);
  std::uint32_t least = 0;
  for (std::size_t i = 0; i < number; ++i) {
    const auto place = element<std::uint32_t>(places, i);
    std::uint32_t gap = place - least;
    for (; gap >= kMore; gap >>= kGapBits) {
      bytes.push_back(static_cast<std::uint8_t>(gap % kMore | kMore));
    }
    bytes.push_back(static_cast<std::uint8_t>(gap));
    least = place + 1;
  }
  return bytes;
}

bool unpack_places(const std::uint8_t* bytes, std::size_t size, std::size_t number,
                   std::size_t count, std::vector<std::uint32_t>* places) {
  places->clear();
  if (number > size || number > count) return false;  // a place has at least one byte
  places->reserve(number);
  std::uint64_t least = 0;
  std::size_t at = 0;
  while (places->size() < number) {
    std::uint64_t place = least;
    for (unsigned shift = 0;; shift += kGapBits) {
      if (at == size || shift > 32) return false;
      const std::uint8_t byte = bytes[at++];
      place += std::uint64_t{byte % kMore} << shift;
      if (byte < kMore) break;
    }
    if (place >= count) return false;
    places->push_back(static_cast<std::uint32_t>(place));
    least = place + 1;
  }
  return at == size;
}

}  // namespace pycoll::kernels
