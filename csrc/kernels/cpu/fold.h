// The loops of the kernels. Each makes one pass over all sources, several vectors at a time, and
// handles the rest of less than a vector with the same steps.
#pragma once

#include "kernels/cpu/formats.h"
#include "kernels/cpu/steps.h"
#include "kernels/reduce.h"

namespace pycoll::kernels {

// combine() of reduce.h; sizes in bytes. `fixed` is the number of sources, or 0 for any number. The
// general loop is as fast where memory or arithmetic is the bottleneck, and saves code.
template <typename M, typename Format, typename Step, int fixed>
struct Fold {
  using Narrow = typename Format::Narrow;
  using Wide = typename Format::Wide;
  static constexpr std::size_t kBytes = sizeof(Narrow);

  // Not inlined, because several dtypes share one instance.
  [[gnu::noinline]] static void run(char* target, const void* const* sources, int source_count,
                                    std::size_t bytes) {
    const int count = fixed != 0 ? fixed : source_count;
    const char* from[kSourcesMax];
    for (int k = 0; k < count; ++k) from[k] = static_cast<const char*>(sources[k]);
    std::size_t at = 0;
    if constexpr (constexpr int n = Format::kUnroll; n > 1) {
      for (; at + n * kBytes <= bytes; at += n * kBytes) block<n>(target, from, count, at);
    }
    for (; at + kBytes <= bytes; at += kBytes) block<1>(target, from, count, at);
    if (at < bytes) tail(target, from, count, at, bytes - at);
  }

 private:
  // A block loads everything before it stores, because the target may be one of the sources.
  template <int vectors>
  PYCOLL_LANES void block(char* target, const char* const* from, int count, std::size_t at) {
    Wide sum[vectors];
    for (int v = 0; v < vectors; ++v) sum[v] = get(from[0] + at + v * kBytes);
    for (int k = 1; k < count - 1; ++k) {
      for (int v = 0; v < vectors; ++v) {
        sum[v] = round(Step::apply(sum[v], get(from[k] + at + v * kBytes)));
      }
    }
    for (int v = 0; v < vectors; ++v) {
      sum[v] = Step::apply(sum[v], get(from[count - 1] + at + v * kBytes));
    }
    if constexpr (vectors > 1 && requires { Format::any_nan(sum); }) {
      if (!Format::any_nan(sum)) [[likely]] {
        for (int v = 0; v < vectors; ++v) M::store(target + at + v * kBytes, sum[v]);
        return;
      }
    }
    for (int v = 0; v < vectors; ++v) put(target + at + v * kBytes, sum[v]);
  }

  PYCOLL_LANES void tail(char* target, const char* const* from, int count, std::size_t at,
                         std::size_t bytes) {
    Wide sum = Format::decode(M::template load_tail<Narrow>(from[0] + at, bytes));
    for (int k = 1; k < count; ++k) {
      if (k > 1) sum = round(sum);
      sum = Step::apply(sum, Format::decode(M::template load_tail<Narrow>(from[k] + at, bytes)));
    }
    M::store_tail(target + at, Format::encode(sum), bytes);
  }

  PYCOLL_LANES Wide get(const char* from) {
    if constexpr (requires { Format::load(from); }) return Format::load(from);
    return Format::decode(M::template load<Narrow>(from));
  }

  PYCOLL_LANES void put(char* to, Wide sum) {
    if constexpr (requires { Format::store(to, sum); }) return Format::store(to, sum);
    M::store(to, Format::encode(sum));
  }

  // Rounds between two steps; encode() rounds the last result.
  PYCOLL_LANES Wide round(Wide sum) {
    if constexpr (Step::kRounds) return Format::round_wide(sum);
    return sum;
  }
};

// scale() of reduce.h for float types; sizes in bytes.
template <typename M, typename Format>
struct Quotient {
  using Narrow = typename Format::Narrow;
  using Wide = typename Format::Wide;
  static constexpr std::size_t kBytes = sizeof(Narrow);

  static void run(char* data, std::size_t bytes, std::uint32_t divisor) {
    const auto by = static_cast<typename Format::Divisor>(divisor);
    std::size_t at = 0;
    for (; at + kBytes <= bytes; at += kBytes) {
      const Wide value = Format::decode(M::template load<Narrow>(data + at));
      M::store(data + at, Format::encode(value / by));
    }
    if (at == bytes) return;
    const Wide value = Format::decode(M::template load_tail<Narrow>(data + at, bytes - at));
    M::store_tail(data + at, Format::encode(value / by), bytes - at);
  }
};

// The wire form of averages of small floats: to float32 and back. Each element is widened to a word
// of 32 bits with zeros, so the floats have the order of the elements. `Storage` is the element's
// type in memory.
template <typename M, typename Format, typename Storage>
struct Mean {
  using Float = typename M::Float;
  using Words = typename M::Words;
  static constexpr std::size_t kItems = sizeof(Float) / sizeof(float);
  using Items = Vector<Storage, static_cast<int>(kItems * sizeof(Storage))>;

  static void enter(char* wire, const char* array, std::size_t count, float factor) {
    std::size_t i = 0;
    for (; i + kItems <= count; i += kItems) {
      Items items;
      __builtin_memcpy(&items, array + i * sizeof(Storage), sizeof(Items));
      M::store(wire + i * sizeof(float), widen(items) * factor);
    }
    if (i == count) return;
    Items items = {};
    __builtin_memcpy(&items, array + i * sizeof(Storage), (count - i) * sizeof(Storage));
    M::store_tail(wire + i * sizeof(float), widen(items) * factor, (count - i) * sizeof(float));
  }

  static void leave(char* array, const char* wire, std::size_t count, float divisor) {
    std::size_t i = 0;
    for (; i + kItems <= count; i += kItems) {
      const Items items = narrow(M::template load<Float>(wire + i * sizeof(float)) / divisor);
      __builtin_memcpy(array + i * sizeof(Storage), &items, sizeof(Items));
    }
    if (i == count) return;
    const std::size_t rest = count - i;
    const auto sums = M::template load_tail<Float>(wire + i * sizeof(float), rest * sizeof(float));
    const Items items = narrow(sums / divisor);
    __builtin_memcpy(array + i * sizeof(Storage), &items, rest * sizeof(Storage));
  }

 private:
  PYCOLL_LANES Float widen(Items items) {
    if constexpr (requires { Format::widen(items); }) {
      return Format::widen(items);
    } else {
      return Format::decode(__builtin_convertvector(items, Words)).part[0];
    }
  }

  PYCOLL_LANES Items narrow(Float values) {
    if constexpr (requires { Format::widen(Items{}); }) {
      return Format::template narrow<Items>(values);
    } else {
      typename Format::Wide wide = {};
      wide.part[0] = values;
      return __builtin_convertvector((Words)Format::encode(wide), Items);
    }
  }
};

}  // namespace pycoll::kernels
