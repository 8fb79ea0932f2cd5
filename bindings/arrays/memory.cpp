// Memory that ranks on the same host can read in place.
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>

#include "base/cache.h"
#include "bindings/arrays/numpy_memory.h"
#include "shared_memory/shm_arena.h"
#include "transport/capabilities.h"
#include "transport/shm/shm_layout.h"

namespace pycoll::bindings {
namespace {

namespace shm = transport::shm;

class ReachableMemory {
 public:
  ReachableMemory(std::size_t bytes, shm::InChild in_child)
      : bytes_(bytes), data_(shm::Arena::of_process().allocate(bytes, in_child)) {
    if (data_ == nullptr) throw std::bad_alloc();
  }
  ReachableMemory(const ReachableMemory&) = delete;
  ReachableMemory& operator=(const ReachableMemory&) = delete;
  ~ReachableMemory() { shm::Arena::free(data_); }

  py::buffer_info buffer() {
    return {data_, 1, py::format_descriptor<unsigned char>::format(),
            static_cast<py::ssize_t>(bytes_)};
  }

 private:
  std::size_t bytes_;
  std::byte* data_;
};

const std::byte* at(const py::int_& address) {
  const auto* data = static_cast<const std::byte*>(PyLong_AsVoidPtr(address.ptr()));
  if (data == nullptr && PyErr_Occurred() != nullptr) throw py::error_already_set();
  return data;
}

}  // namespace

void bind_memory(py::module_& module) {
  module.attr("UNCOPIED_BYTES_MIN") = transport::kUncopiedBytesMin;
  py::class_<numpy::SharedArrays>(module, "SharedArrays")
      .def(py::init<>())
      .def_property_readonly("refusal", &numpy::SharedArrays::refusal);
  py::class_<numpy::SharedBlock>(module, "SharedBlock")
      .def(py::init<>())
      .def_property_readonly("refusal", &numpy::SharedBlock::refusal)
      .def("leave", &numpy::SharedBlock::leave);
  module.attr("SHARED_BYTES_MIN") = numpy::kSharedBytesMin;
  // Not visible in the module; only the memoryviews that own it refer to it.
  py::class_<ReachableMemory>(py::handle(), "ReachableMemory", py::buffer_protocol())
      .def_buffer(&ReachableMemory::buffer);
  module.def(
      "reachable_memory",
      [](std::size_t nbytes, bool copied_by_forks) {
        if (copied_by_forks) numpy::guard_forks();
        const auto in_child = copied_by_forks ? shm::InChild::kCopied : shm::InChild::kShared;
        return py::memoryview(py::cast(std::make_unique<ReachableMemory>(nbytes, in_child)));
      },
      py::arg("nbytes"), py::arg("copied_by_forks") = false);
  module.def(
      "is_reachable",
      [](const py::int_& address, std::size_t nbytes) {
        std::uint64_t offset = 0;
        return shm::Arena::of_process().find(at(address), nbytes, &offset);
      },
      py::arg("address"), py::arg("nbytes"));
  module.def(
      "bring_back",
      [](const py::int_& address, std::size_t nbytes) {
        return shm::Arena::of_process().bring_back(at(address), nbytes);
      },
      py::arg("address"), py::arg("nbytes"));
  module.def("core_cache_bytes", &core_cache_bytes);
  module.def("reachable_memory_is_quick",
             [] { return shm::Arena::of_process().gives_huge_pages(); });
}

}  // namespace pycoll::bindings
