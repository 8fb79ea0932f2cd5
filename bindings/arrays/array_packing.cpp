#include "bindings/arrays/array_packing.h"

#include <pybind11/stl.h>

#include <cstring>
#include <utility>

#include "bindings/core/errors.h"
#include "bindings/core/gil.h"

namespace pycoll::bindings {
namespace {

// The axes that remain after the dense inner ones were merged into one run of bytes.
struct Walk {
  std::size_t axes;
  std::size_t run;
};

Walk plan_walk(const BufferView& view) {
  Walk walk{view.shape.size(), item_bytes(view.dtype)};
  while (walk.axes > 0) {
    const std::size_t axis = walk.axes - 1;
    const bool dense = view.strides[axis] == static_cast<py::ssize_t>(walk.run);
    if (!dense && view.shape[axis] != 1) break;
    walk.run *= static_cast<std::size_t>(view.shape[axis]);
    --walk.axes;
  }
  return walk;
}

// Calls visit(address in the array) for every run, in C order.
template <typename Visit>
void walk_runs(std::byte* data, const py::ssize_t* shape, const py::ssize_t* strides,
               std::size_t axes, const Visit& visit) {
  if (axes == 0) {
    visit(data);
    return;
  }
  for (py::ssize_t index = 0; index < shape[0]; ++index) {
    walk_runs(data + index * strides[0], shape + 1, strides + 1, axes - 1, visit);
  }
}

// A copy of constant length compiles to one or two instructions; most runs are single elements.
template <std::size_t kBytes>
struct FixedCopy {
  void operator()(std::byte* to, const std::byte* from) const { std::memcpy(to, from, kBytes); }
};
struct AnyCopy {
  std::size_t bytes;
  void operator()(std::byte* to, const std::byte* from) const { std::memcpy(to, from, bytes); }
};

template <typename Use>
void with_copy(std::size_t run, const Use& use) {
  switch (run) {
    case 1:
      return use(FixedCopy<1>{});
    case 2:
      return use(FixedCopy<2>{});
    case 4:
      return use(FixedCopy<4>{});
    case 8:
      return use(FixedCopy<8>{});
    case 16:
      return use(FixedCopy<16>{});
    default:
      return use(AnyCopy{run});
  }
}

BufferView pack_one(const BufferView& view) {
  if (view.contiguous) return view;
  BufferView copy;
  copy.dtype = view.dtype;
  copy.shape = view.shape;
  copy.strides.resize(view.shape.size());
  auto stride = static_cast<py::ssize_t>(item_bytes(view.dtype));
  for (std::size_t axis = view.shape.size(); axis-- > 0; stride *= view.shape[axis]) {
    copy.strides[axis] = stride;
  }
  copy.count = view.count;
  copy.extent = view.bytes();
  const auto memory = std::make_shared_for_overwrite<std::byte[]>(copy.extent);
  copy.data = memory.get();
  copy.low = memory.get();
  copy.owner = memory;
  copy.writable = true;
  const ReleasedGil release;
  gather_elements(view, copy.data);
  return copy;
}

void check_space(const std::vector<const BufferView*>& views, const BufferView& whole) {
  std::uint64_t bytes = 0;
  for (const BufferView* view : views) bytes += view->bytes();
  if (bytes == whole.bytes() && whole.contiguous) return;
  raise_if_failed(Status::error(Code::kInvalidArgument,
                                "the arrays have " + std::to_string(bytes) + " bytes, the buffer " +
                                    std::to_string(whole.bytes()) + " (and must be contiguous)"),
                  "group");
}

void pack(const std::vector<const BufferView*>& views, const BufferView& target) {
  check_space(views, target);
  const ReleasedGil release;
  std::byte* cursor = target.data;
  for (const BufferView* view : views) {
    gather_elements(*view, cursor);
    cursor += view->bytes();
  }
}

void unpack(const BufferView& source, const std::vector<const BufferView*>& views) {
  check_space(views, source);
  const ReleasedGil release;
  const std::byte* cursor = source.data;
  for (const BufferView* view : views) {
    scatter_elements(cursor, *view);
    cursor += view->bytes();
  }
}

void fill_with(const BufferView& view, const py::bytes& element) {
  const std::string_view bits = element;
  const std::size_t item = item_bytes(view.dtype);
  if (bits.size() != item || !view.contiguous || !view.writable) {
    raise_if_failed(Status::error(Code::kInvalidArgument,
                                  "fill needs contiguous, writable memory and an element of " +
                                      std::to_string(item) + " bytes"),
                    "fill");
  }
  const ReleasedGil release;
  for (std::uint64_t i = 0; i < view.count; ++i) {
    std::memcpy(view.data + i * item, bits.data(), item);
  }
}

}  // namespace

void gather_elements(const BufferView& view, std::byte* target) {
  if (view.count == 0) return;
  const Walk walk = plan_walk(view);
  with_copy(walk.run, [&](const auto& copy) {
    walk_runs(view.data, view.shape.data(), view.strides.data(), walk.axes, [&](std::byte* run) {
      copy(target, run);
      target += walk.run;
    });
  });
}

void scatter_elements(const std::byte* source, const BufferView& view) {
  if (view.count == 0) return;
  const Walk walk = plan_walk(view);
  with_copy(walk.run, [&](const auto& copy) {
    walk_runs(view.data, view.shape.data(), view.strides.data(), walk.axes, [&](std::byte* run) {
      copy(run, source);
      source += walk.run;
    });
  });
}

void bind_packing(py::module_& module) {
  module.def("packed", &pack_one, py::arg("view"),
             "The view itself if it is contiguous, else a contiguous copy.");
  module.def("pack", &pack, py::arg("views"), py::arg("target"),
             "Copy the views one behind the other into `target`, which has exactly their bytes.");
  module.def("unpack", &unpack, py::arg("source"), py::arg("views"), "The reverse of pack.");
  module.def("fill", &fill_with, py::arg("view"), py::arg("element"),
             "Set every element to the one with these bytes.");
}

}  // namespace pycoll::bindings
