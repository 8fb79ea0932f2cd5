// Memory that ranks on the same host read where it lies.
#include <memory>
#include <new>

#include "bindings/bind.h"
#include "bindings/numpy_memory.h"
#include "transport/shm_arena.h"
#include "transport/shm_layout.h"

namespace pycoll::bindings {
namespace {

namespace shm = transport::shm;

class ReachableMemory {
 public:
  explicit ReachableMemory(std::size_t bytes)
      : bytes_(bytes), data_(shm::Arena::of_process().allocate(bytes)) {
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

}  // namespace

void bind_memory(py::module_& module) {
  module.attr("LENT_BYTES_MIN") = shm::kLentBytesMin;
  py::class_<numpy::SharedArrays>(module, "SharedArrays").def(py::init<>());
  module.attr("SHARED_BYTES_MIN") = numpy::kSharedBytesMin;
  // Known to nobody but the memoryviews that keep it.
  py::class_<ReachableMemory>(py::handle(), "ReachableMemory", py::buffer_protocol())
      .def_buffer(&ReachableMemory::buffer);
  module.def(
      "reachable_memory",
      [](std::size_t nbytes) {
        return py::memoryview(py::cast(std::make_unique<ReachableMemory>(nbytes)));
      },
      py::arg("nbytes"));
}

}  // namespace pycoll::bindings
