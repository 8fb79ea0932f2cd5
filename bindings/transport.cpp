// Transports are made and connected from Python (pycoll/bootstrap), which owns admission; here
// descriptors pass into native ownership.
#include <pybind11/stl.h>

#include <string>
#include <utility>
#include <vector>

#include "bindings/bind.h"
#include "transport/shm.h"
#include "transport/tcp.h"

namespace pycoll::bindings {
namespace {

struct ShmHandle : TransportHandle {
  transport::ShmTransport* shm = nullptr;
};

struct TcpHandle : TransportHandle {
  transport::TcpTransport* tcp = nullptr;
};

ShmHandle make_shm(int rank, int size) {
  std::unique_ptr<transport::ShmTransport> made;
  raise_if_failed(transport::ShmTransport::create(rank, size, &made), "init");
  ShmHandle handle;
  handle.shm = made.get();
  handle.transport = std::move(made);
  return handle;
}

void attach_shm(ShmHandle& handle, int peer, int segment, int doorbell, int liveness, int pid) {
  raise_if_failed(
      handle.shm->attach(peer, UniqueFd(segment), UniqueFd(doorbell), UniqueFd(liveness), pid),
      "init");
}

TcpHandle make_tcp(int rank, int size) {
  auto made = std::make_unique<transport::TcpTransport>(rank, size);
  TcpHandle handle;
  handle.tcp = made.get();
  handle.transport = std::move(made);
  return handle;
}

void attach_tcp(TcpHandle& handle, int peer, const std::vector<int>& sockets, std::string address) {
  std::vector<UniqueFd> owned;
  owned.reserve(sockets.size());
  for (const int socket : sockets) owned.emplace_back(socket);
  raise_if_failed(handle.tcp->attach(peer, std::move(owned), std::move(address)), "init");
}

}  // namespace

void bind_transports(py::module_& module) {
  py::class_<TransportHandle>(module, "Transport", "One rank's end of one medium.")
      .def_property_readonly("name", [](const TransportHandle& handle) {
        return std::string(handle.transport->name());
      });
  py::class_<ShmHandle, TransportHandle>(module, "ShmTransport", "Shared memory of one host.")
      .def(py::init(&make_shm), py::arg("rank"), py::arg("size"))
      .def(
          "segment_fd", [](const ShmHandle& handle) { return handle.shm->segment_fd(); },
          "This rank's memory, to be passed to peers; stays owned here.")
      .def(
          "doorbell_fd", [](const ShmHandle& handle) { return handle.shm->doorbell_fd(); },
          "This rank's doorbell, to be passed to peers; stays owned here.")
      .def("attach", &attach_shm, py::arg("peer"), py::arg("segment_fd"), py::arg("doorbell_fd"),
           py::arg("liveness_fd"), py::arg("pid"),
           "Join a peer's memory. Takes ownership of the three descriptors.");
  py::class_<TcpHandle, TransportHandle>(module, "TcpTransport", "Stream sockets between hosts.")
      .def(py::init(&make_tcp), py::arg("rank"), py::arg("size"))
      .def("attach", &attach_tcp, py::arg("peer"), py::arg("socket_fds"), py::arg("address"),
           "Use connected, authenticated sockets to a peer. Takes ownership of them.");
}

}  // namespace pycoll::bindings
