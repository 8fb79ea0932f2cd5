// Kernels of tables on parameter servers: places of ids, and rows by place.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>

#include "bindings/arrays/buffer.h"
#include "bindings/core/errors.h"
#include "bindings/core/gil.h"
#include "bindings/kernels/codec.h"
#include "kernels/dispatch.h"
#include "kernels/stored_rows.h"

namespace pycoll::bindings {
namespace {

using kernels::Isa;

// Throws InvalidArgumentError unless `good`.
void require_rows(bool good, const std::string& message) {
  if (!good) raise_if_failed(Status::error(Code::kInvalidArgument, message), "ps");
}

void require_numbers(const BufferView& view, const char* name, bool writable = false) {
  require_rows(
      view.dtype == DType::kInt64 && view.contiguous && (view.writable || !writable),
      std::string(name) + " must be int64, in one piece" + (writable ? ", and writable" : ""));
}

// Arrays that native code indexes as such must be aligned; others may lie anywhere.
template <typename T>
T* need_aligned(const BufferView& view, const char* name) {
  require_rows(reinterpret_cast<std::uintptr_t>(view.data) % alignof(T) == 0,
               std::string(name) + " must be aligned");
  return reinterpret_cast<T*>(view.data);
}

bool is_power_of_2(std::uint64_t number) { return number != 0 && (number & (number - 1)) == 0; }

// Returns the index of the first `count` ids.
kernels::RowIndex index_of(const BufferView& slots, const BufferView& ids, std::size_t count) {
  require_numbers(slots, "slots", true);
  require_rows(is_power_of_2(slots.count) && slots.count > count,
               "slots are " + std::to_string(slots.count) + ": expected a power of 2 above " +
                   std::to_string(count));
  require_numbers(ids, "ids");
  require_rows(count <= ids.count, "count is " + std::to_string(count) + ": expected at most " +
                                       std::to_string(ids.count));
  return {need_aligned<std::int64_t>(slots, "slots"), slots.count,
          need_aligned<std::int64_t>(ids, "ids"), count};
}

std::size_t find_rows(const BufferView& slots, const BufferView& ids, std::size_t count,
                      const BufferView& wanted, const BufferView& places) {
  const kernels::RowIndex index = index_of(slots, ids, count);
  require_numbers(wanted, "wanted");
  require_numbers(places, "places", true);
  require_rows(places.count == wanted.count, "places must be as many as wanted");
  const ReleasedGil release;
  return kernels::find_rows(index, wanted.data, wanted.count, places.data);
}

std::size_t add_ids(const BufferView& slots, const BufferView& ids, std::size_t count,
                    const BufferView& wanted, const BufferView& places) {
  kernels::RowIndex index = index_of(slots, ids, count);
  require_numbers(ids, "ids", true);
  require_numbers(wanted, "wanted");
  require_numbers(places, "places", true);
  require_rows(places.count == wanted.count, "places must be as many as wanted");
  std::size_t unknown = 0;
  for (std::size_t i = 0; i < places.count; ++i) {
    std::int64_t place = 0;
    std::memcpy(&place, places.data + i * sizeof(place), sizeof(place));
    unknown += place == kernels::kNoPlace ? 1 : 0;
  }
  require_rows(unknown <= ids.count - count && unknown < slots.count - count,
               "ids and slots have no space for " + std::to_string(unknown) + " more");
  const ReleasedGil release;
  kernels::add_ids(&index, wanted.data, wanted.count, places.data);
  return index.count;
}

void fill_slots(const BufferView& slots, const BufferView& ids, std::size_t count) {
  const kernels::RowIndex index = index_of(slots, ids, count);
  const ReleasedGil release;
  kernels::fill_slots(index);
}

// The bytes of a row of an array whose first axis counts rows.
std::size_t row_bytes_of(const BufferView& rows, const char* name) {
  require_rows(rows.contiguous && !rows.shape.empty(), std::string(name) + " must be in one piece");
  const auto count = static_cast<std::uint64_t>(rows.shape[0]);
  return count == 0 ? 0 : static_cast<std::size_t>(rows.bytes() / count);
}

// Checks that `several` has a row like those of `rows` for each place, and places below `rows`.
void require_places(const BufferView& rows, const BufferView& places, const BufferView& several) {
  require_numbers(places, "places");
  const std::size_t bytes = row_bytes_of(rows, "rows");
  require_rows(several.contiguous && several.bytes() == places.count * bytes,
               "as many rows as places are needed, each of " + std::to_string(bytes) + " bytes");
  std::int64_t low = 0, high = -1;
  for (std::size_t i = 0; i < places.count; ++i) {
    std::int64_t place = 0;
    std::memcpy(&place, places.data + i * sizeof(place), sizeof(place));
    low = std::min(low, place);
    high = std::max(high, place);
  }
  const std::int64_t end = rows.shape[0];
  require_rows(low >= kernels::kNoPlace && high < end,
               "places must be from -1 to " + std::to_string(end - 1));
}

void require_writable(const BufferView& view, const char* name) {
  require_rows(view.writable, std::string(name) + " must be writable");
}

void take_rows(const BufferView& target, const BufferView& rows, const BufferView& places) {
  require_places(rows, places, target);
  require_writable(target, "target");
  const std::size_t bytes = row_bytes_of(rows, "rows");
  const ReleasedGil release;
  kernels::take_rows(target.data, rows.data, bytes, places.data, places.count);
}

void put_rows(const BufferView& rows, const BufferView& places, const BufferView& source) {
  require_places(rows, places, source);
  require_writable(rows, "rows");
  const std::size_t bytes = row_bytes_of(rows, "rows");
  const ReleasedGil release;
  kernels::put_rows(rows.data, bytes, places.data, places.count, source.data);
}

// Checks the arguments of sums, and returns the elements of a row.
std::size_t dim_of(const BufferView& rows, const BufferView& places, const BufferView& source) {
  require_places(rows, places, source);
  require_writable(rows, "rows");
  require_rows(source.dtype == rows.dtype && kernels::defined(rows.dtype, ReduceOp::kSum),
               "rows and source must have one dtype, which can be added");
  return row_bytes_of(rows, "rows") / item_bytes(rows.dtype);
}

void add_rows(const BufferView& rows, const BufferView& places, const BufferView& source,
              const std::string& isa) {
  const std::size_t dim = dim_of(rows, places, source);
  const Isa chosen = isa.empty() ? kernels::best_isa() : isa_of(isa);
  const ReleasedGil release;
  kernels::add_rows(rows.data, rows.dtype, dim, places.data, places.count, source.data, chosen);
}

void sum_rows(const BufferView& target, const BufferView& places, const BufferView& source,
              const std::string& isa) {
  const std::size_t dim = dim_of(target, places, source);
  const Isa chosen = isa.empty() ? kernels::best_isa() : isa_of(isa);
  const auto rows = static_cast<std::size_t>(target.shape[0]);
  const ReleasedGil release;
  kernels::sum_rows(target.data, rows, target.dtype, dim, places.data, places.count, source.data,
                    chosen);
}

std::size_t spread_ids(const BufferView& ids, std::size_t shards, const BufferView& different,
                       const BufferView& places, const BufferView& firsts, const BufferView& bounds,
                       const BufferView& slots) {
  require_numbers(ids, "ids");
  for (const BufferView* one : {&different, &places, &firsts, &bounds}) {
    require_numbers(*one, "each result", true);
    require_rows(one->count == (one == &bounds ? shards + 1 : ids.count),
                 "results must be as long as ids, and bounds one longer than shards");
  }
  require_rows(ids.count < std::uint64_t{1} << 31 && shards >= 1 && shards <= 1 << 16,
               "ids must be below 2^31, and shards from 1 to 2^16");
  require_rows(slots.dtype == DType::kInt32 && slots.contiguous && slots.writable &&
                   is_power_of_2(slots.count) && slots.count > ids.count,
               "slots must be int32, in one piece, writable, and a power of 2 above ids");
  const kernels::SpreadIds result{different.data,
                                  places.data,
                                  firsts.data,
                                  bounds.data,
                                  need_aligned<std::int32_t>(slots, "slots"),
                                  slots.count};
  const ReleasedGil release;
  return kernels::spread_ids(ids.data, ids.count, shards, result);
}

void count_ids(const BufferView& known, const BufferView& counts, std::size_t kept,
               const BufferView& ids) {
  require_numbers(known, "known", true);
  require_numbers(counts, "counts", true);
  require_numbers(ids, "ids");
  require_rows(known.count == counts.count && is_power_of_2(known.count) && kept >= 1 &&
                   kept <= known.count / 4,
               "known and counts must have a power of 2 entries, at least 4 times kept");
  const kernels::IdCounts table{need_aligned<std::int64_t>(known, "known"),
                                need_aligned<std::int64_t>(counts, "counts"), known.count, kept};
  const ReleasedGil release;
  kernels::count_ids(table, ids.data, ids.count);
}

}  // namespace

void bind_row_kernels(py::module_& module) {
  module.def("find_rows", &find_rows, py::arg("slots"), py::arg("ids"), py::arg("count"),
             py::arg("wanted"), py::arg("places"),
             "Write the place of each wanted id among the first `count` ids, and -1 for unknown\n"
             "ones. Return how many are unknown.");
  module.def("add_ids", &add_ids, py::arg("slots"), py::arg("ids"), py::arg("count"),
             py::arg("wanted"), py::arg("places"),
             "Give the wanted ids whose place is -1 the next places. Return the new count.");
  module.def("fill_slots", &fill_slots, py::arg("slots"), py::arg("ids"), py::arg("count"),
             "Enter the first `count` ids into slots that are all free.");
  module.def("take_rows", &take_rows, py::arg("target"), py::arg("rows"), py::arg("places"),
             "Copy rows[places[i]] to target[i]; place -1 copies nothing.");
  module.def("put_rows", &put_rows, py::arg("rows"), py::arg("places"), py::arg("source"),
             "Copy source[i] to rows[places[i]]; place -1 copies nothing.");
  module.def("add_rows", &add_rows, py::arg("rows"), py::arg("places"), py::arg("source"),
             py::arg("isa") = "", "Add source[i] to rows[places[i]], in this order.");
  module.def("sum_rows", &sum_rows, py::arg("target"), py::arg("places"), py::arg("source"),
             py::arg("isa") = "",
             "As add_rows(), but the first row of each place takes the place of what was there.");
  module.def("spread_ids", &spread_ids, py::arg("ids"), py::arg("shards"), py::arg("different"),
             py::arg("places"), py::arg("firsts"), py::arg("bounds"), py::arg("slots"),
             "Write the different ids by shard in the order in which they occur first; of each\n"
             "given id its index there; of each different one the index at which it is given\n"
             "first; and where the ids of each shard begin. Return how many are different.");
  module.def("count_ids", &count_ids, py::arg("known"), py::arg("counts"), py::arg("kept"),
             py::arg("ids"),
             "Count ids in a hash table that keeps those that occur most. A count of 0 is free.");
}

}  // namespace pycoll::bindings
