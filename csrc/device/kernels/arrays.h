// Device code: the caller's elements, in one array or in several that count as one. A place is a
// distance in bytes from the first element, over all arrays. Units, segments and arrays consist of
// whole elements, so the end of an array never cuts an element.
#pragma once

#include <cstddef>
#include <cstdint>

#include "device/kernels/local.h"
#include "device/kernels/pack.h"
#include "device/kernels/program.h"

namespace pycoll::device {

class OneArray {
 public:
  using Call = device::Call;
  using Local = std::byte*;  // nullptr: there is none
  // Whether peers may write directly to the output.
  static constexpr bool kWritesDirect = true;
  PYCOLL_DEVICE explicit OneArray(const Call& call) : call_(call) {}

  PYCOLL_DEVICE static Local none() { return nullptr; }
  PYCOLL_DEVICE static Local own(std::byte* memory) { return memory; }
  PYCOLL_DEVICE Local input(std::uint64_t place) const {
    return const_cast<std::byte*>(call_.input) + place;  // never written to
  }
  PYCOLL_DEVICE Local output(std::uint64_t place) const { return call_.output + place; }

  PYCOLL_DEVICE static bool exists(Local local) { return local != nullptr; }
  PYCOLL_DEVICE static std::byte* address(Local local) { return local; }
  // Sixteen bytes or fewer from `offset` on; see local.h.
  PYCOLL_DEVICE static Pack load_at(Local from, std::uint32_t offset, std::uint32_t bytes) {
    return load_bytes(from + offset, bytes);
  }
  PYCOLL_DEVICE static void store_at(Local to, std::uint32_t offset, Pack pack,
                                     std::uint32_t bytes) {
    store_bytes(to + offset, pack, bytes);
  }

 private:
  const Call& call_;
};

class ManyArrays {
 public:
  using Call = ListCall;
  enum class Kind : std::uint8_t { kNone, kOwn, kInput, kOutput };
  struct Local {
    Kind kind;
    std::byte* memory;    // of kOwn
    std::uint64_t place;  // of the others
  };
  static constexpr bool kWritesDirect = false;
  PYCOLL_DEVICE explicit ManyArrays(const Call& call) : call_(call) {}

  PYCOLL_DEVICE static Local none() { return {Kind::kNone, nullptr, 0}; }
  PYCOLL_DEVICE static Local own(std::byte* memory) { return {Kind::kOwn, memory, 0}; }
  PYCOLL_DEVICE static Local input(std::uint64_t place) { return {Kind::kInput, nullptr, place}; }
  PYCOLL_DEVICE static Local output(std::uint64_t place) { return {Kind::kOutput, nullptr, place}; }

  PYCOLL_DEVICE static bool exists(const Local& local) { return local.kind != Kind::kNone; }
  // Several arrays have no common address.
  PYCOLL_DEVICE static std::byte* address(const Local& /*local*/) { return nullptr; }

  PYCOLL_DEVICE Pack load_at(const Local& from, std::uint32_t offset, std::uint32_t bytes) const {
    if (from.kind == Kind::kOwn) return load_bytes(from.memory + offset, bytes);
    Pack pack{0, 0};
    std::uint32_t part = part_of(from.place + offset);
    PYCOLL_NO_UNROLL
    for (std::uint32_t done = 0; done < bytes; ++part) {
      const Run run = run_of(from, part, from.place + offset + done, bytes - done);
      const Pack piece = load_bytes(run.memory, run.bytes);
      put_bits(pack, done, piece.low);
      if (run.bytes > 8) put_bits(pack, done + 8, piece.high);
      done += run.bytes;
    }
    return pack;
  }

  PYCOLL_DEVICE void store_at(const Local& to, std::uint32_t offset, Pack pack,
                              std::uint32_t bytes) const {
    if (to.kind == Kind::kOwn) return store_bytes(to.memory + offset, pack, bytes);
    std::uint32_t part = part_of(to.place + offset);
    PYCOLL_NO_UNROLL
    for (std::uint32_t done = 0; done < bytes; ++part) {
      const Run run = run_of(to, part, to.place + offset + done, bytes - done);
      const std::uint64_t high = run.bytes > 8 ? bits_from(pack, done + 8) : 0;
      store_bytes(run.memory, {bits_from(pack, done), high}, run.bytes);
      done += run.bytes;
    }
  }

 private:
  // Contiguous memory.
  struct Run {
    std::byte* memory;
    std::uint32_t bytes;
  };

  // The index of the array that contains the place.
  PYCOLL_DEVICE std::uint32_t part_of(std::uint64_t place) const {
    std::uint32_t first = 0;
    std::uint32_t behind = call_.count;
    PYCOLL_NO_UNROLL
    while (first < behind) {
      const std::uint32_t middle = (first + behind) / 2;
      if (place < call_.parts[middle].end) {
        behind = middle;
      } else {
        first = middle + 1;
      }
    }
    return first;
  }

  PYCOLL_DEVICE Run run_of(const Local& local, std::uint32_t number, std::uint64_t place,
                           std::uint32_t most) const {
    const Part& part = call_.parts[number];
    const std::uint64_t begin = number == 0 ? 0 : call_.parts[number - 1].end;
    const std::uint64_t left = part.end - place;
    std::byte* memory =
        local.kind == Kind::kInput ? const_cast<std::byte*>(part.input) : part.output;
    return {memory + (place - begin), left < most ? static_cast<std::uint32_t>(left) : most};
  }

  const Call& call_;
};

}  // namespace pycoll::device
