// The plans that make_plans.py wrote: every collective and algorithm for 2 to 8 ranks.
#pragma once

#include <cstdint>
#include <cstring>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "plan/image.h"
#include "tests/cpp/support/check.h"

namespace pycoll::testing {

struct Schedule {
  std::string name;  // "all_reduce/ring"
  std::uint32_t size = 0;
  std::uint32_t root = 0;
  std::vector<std::shared_ptr<const plan::Image>> plans;  // by rank

  Collective collective() const { return static_cast<Collective>(plans[0]->header().collective); }
};

inline std::vector<Schedule> read_schedules(const char* path) {
  std::ifstream file(path, std::ios::binary);
  std::vector<Schedule> all;
  Schedule one;
  while (file >> one.name >> one.size >> one.root) {
    file.get();
    one.plans.clear();
    for (std::uint32_t rank = 0; rank < one.size; ++rank) {
      std::uint32_t length = 0;
      file.read(reinterpret_cast<char*>(&length), sizeof(length));
      std::vector<std::uint64_t> words(length / 8 + 1);
      file.read(reinterpret_cast<char*>(words.data()), length);
      std::shared_ptr<const plan::Image> image;
      const auto bytes = std::as_bytes(std::span(words)).first(length);
      const Status status = plan::Image::load(bytes, &image);
      CHECK(status.ok(), "%s of %u ranks, rank %u: %s", one.name.c_str(), one.size, rank,
            status.message().c_str());
      one.plans.push_back(std::move(image));
    }
    all.push_back(one);
  }
  CHECK(all.size() > 300, "%zu schedules in %s", all.size(), path);
  return all;
}

inline const std::vector<Schedule>& schedules() {
  static const std::vector<Schedule> all = read_schedules(PYCOLL_DEVICE_PLANS);
  return all;
}

inline const Schedule& find_schedule(const std::string& name, std::uint32_t size) {
  for (const Schedule& one : schedules()) {
    if (one.name == name && one.size == size) return one;
  }
  CHECK(false, "no schedule %s for %u ranks", name.c_str(), size);
  std::abort();
}

}  // namespace pycoll::testing
