// Transports. Python (pycoll/bootstrap) creates and connects them, and owns admission. Here
// descriptors pass into native ownership.
#include "bindings/engine/transport.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/arrays/buffer.h"
#include "bindings/core/errors.h"
#include "bindings/core/gil.h"
#include "transport/shm/shm.h"
#include "transport/shm/shm_stores.h"
#include "transport/tcp/tcp.h"
#include "transport/verbs/verbs.h"

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

void attach_shm(ShmHandle& handle, int peer, int shared_file, int doorbell, int liveness, int pid) {
  raise_if_failed(
      handle.shm->attach(peer, UniqueFd(shared_file), UniqueFd(doorbell), UniqueFd(liveness), pid),
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

struct VerbsHandle : TransportHandle {
  transport::VerbsTransport* verbs = nullptr;
};

using PortWords = std::tuple<std::string, int, int>;  // device, port, index of the GID

VerbsHandle make_verbs(int rank, int size, const std::vector<PortWords>& ports) {
  std::vector<transport::VerbsPort> wanted;
  wanted.reserve(ports.size());
  for (const auto& [device, port, gid_index] : ports) wanted.push_back({device, port, gid_index});
  std::unique_ptr<transport::VerbsTransport> made;
  raise_if_failed(transport::VerbsTransport::create(rank, size, wanted, &made), "init");
  VerbsHandle handle;
  handle.verbs = made.get();
  handle.transport = std::move(made);
  return handle;
}

py::bytes prepare_verbs(VerbsHandle& handle, int peer, const std::vector<int>& rails) {
  std::string address;
  raise_if_failed(handle.verbs->prepare(peer, rails, &address), "init");
  return address;
}

void attach_verbs(VerbsHandle& handle, int peer, const py::bytes& address, int liveness,
                  std::string name) {
  UniqueFd owned(liveness);
  raise_if_failed(
      handle.verbs->attach(peer, std::string(address), std::move(owned), std::move(name)), "init");
}

py::tuple registered_by_verbs(const VerbsHandle& handle) {
  const transport::verbs::RegistrationFacts facts = handle.verbs->registration_facts();
  return py::make_tuple(facts.pinned_bytes, facts.refusal);
}

// Keeps the whole extent of the view registered, gaps included.
bool keep_by_verbs(VerbsHandle& handle, const BufferView& view) {
  auto* low = const_cast<std::byte*>(view.low);  // memory that the caller may write
  if (!view.writable || view.extent == 0) return false;
  return handle.verbs->keep(low, view.extent);
}

void bind_shm(py::module_& module) {
  py::class_<ShmHandle, TransportHandle>(module, "ShmTransport", "Shared memory of one host.")
      .def(py::init(&make_shm), py::arg("rank"), py::arg("size"))
      .def(
          "segment_fd", [](const ShmHandle& handle) { return handle.shm->shared_file_fd(); },
          "This rank's memory, to be passed to peers; stays owned here.")
      .def(
          "doorbell_fd", [](const ShmHandle& handle) { return handle.shm->doorbell_fd(); },
          "This rank's doorbell, to be passed to peers; stays owned here.")
      .def(
          "lifeline_fd", [](const ShmHandle& handle) { return handle.shm->lifeline_fd(); },
          "The socket that closes when this rank ends, to be passed to peers; stays owned here.")
      .def(
          "inbox_fd", [](const ShmHandle& handle) { return handle.shm->inbox_fd(); },
          "The socket on which holders of this rank's lifeline send it descriptors; stays owned "
          "here.")
      .def(
          "liveness_fd",
          [](const ShmHandle& handle, int peer) { return handle.shm->liveness_fd(peer); },
          py::arg("peer"), "The peer's lifeline, or -1; stays owned here.")
      .def("attach", &attach_shm, py::arg("peer"), py::arg("segment_fd"), py::arg("doorbell_fd"),
           py::arg("liveness_fd"), py::arg("pid"),
           "Map a peer's memory. Takes ownership of the three descriptors.")
      .def(
          "use_stores",
          [](const ShmHandle& handle, std::string_view kind) {
            const auto& names = transport::shm::kStoreNames;
            const auto* const found = std::find(names.begin(), names.end(), kind);
            if (found == names.end()) throw py::value_error("no such kind of stores");
            handle.shm->use_stores(static_cast<transport::shm::StoreKind>(found - names.begin()));
          },
          py::arg("kind"),
          "Choose the kind of stores that fill memory which peers read. Call it before any channel "
          "is used. Raises ValueError for an unknown kind.");
  module.def(
      "time_stores",
      [](double limit_s) -> std::optional<std::map<std::string, double>> {
        const auto found = transport::shm::time_stores(static_cast<Nanoseconds>(limit_s * 1e9));
        if (!found.has_value()) return std::nullopt;
        std::map<std::string, double> times;
        for (std::size_t i = 0; i < found->size(); ++i) {
          times[std::string(transport::shm::kStoreNames[i])] =
              static_cast<double>((*found)[i]) * 1e-9 / 1024;
        }
        return times;
      },
      py::arg("limit_s"), py::call_guard<ReleasedGil>(),
      "Return the s/byte of an exchange by the name of each kind of stores. None if they cannot be "
      "measured, or not within about `limit_s` seconds.");
}

}  // namespace

void bind_transports(py::module_& module) {
  py::class_<TransportHandle>(module, "Transport", "One rank's end of one medium.")
      .def_property_readonly("name", [](const TransportHandle& handle) {
        return std::string(handle.transport->name());
      });
  bind_shm(module);
  py::class_<TcpHandle, TransportHandle>(module, "TcpTransport", "Stream sockets between hosts.")
      .def(py::init(&make_tcp), py::arg("rank"), py::arg("size"))
      .def("attach", &attach_tcp, py::arg("peer"), py::arg("socket_fds"), py::arg("address"),
           "Use connected, authenticated sockets to a peer. Takes ownership of them.");
  py::class_<VerbsHandle, TransportHandle>(module, "VerbsTransport", "RDMA between hosts.")
      .def(py::init(&make_verbs), py::arg("rank"), py::arg("size"), py::arg("ports"))
      .def(
          "prepare", &prepare_verbs, py::arg("peer"), py::arg("rails"),
          "Allocate memory and queue pairs for a peer, one over each of the ports `rails`. Returns "
          "the bytes for the peer's attach().")
      .def(
          "forget", [](VerbsHandle& handle, int peer) { handle.verbs->forget(peer); },
          py::arg("peer"), "Free the resources of prepare() for a peer that is not attached.")
      .def("attach", &attach_verbs, py::arg("peer"), py::arg("address"), py::arg("liveness_fd"),
           py::arg("name"),
           "Connect to a prepared peer. Takes ownership of the socket, which closes when the peer "
           "ends.")
      .def("registered", &registered_by_verbs,
           "Return the registered bytes of users' memory, and the reason why a registration was "
           "refused; empty if none was.")
      .def("keep", &keep_by_verbs, py::arg("view"), py::call_guard<ReleasedGil>(),
           "Register memory that the caller leaves in place until lapse(). Return False if that is "
           "not possible.")
      .def(
          "lapse",
          [](VerbsHandle& handle, const BufferView& view) {
            handle.verbs->lapse(view.low, view.extent);
          },
          py::arg("view"), "Undo one keep().");
  module.def("verbs_missing", &transport::verbs_missing,
             "Why this process cannot use verbs; empty if it can.");
}

}  // namespace pycoll::bindings
