// Replaces verbs.cpp in builds without infiniband/verbs.h.
#include "transport/verbs/verbs.h"

namespace pycoll::transport {

std::string verbs_missing() {
  return "not part of this build: infiniband/verbs.h was missing; install libibverbs-dev (Debian) "
         "or rdma-core-devel (Fedora) and build pycoll again";
}

Status VerbsTransport::create(int, int, const std::vector<VerbsPort>&,
                              std::unique_ptr<VerbsTransport>*) {
  return Status::error(Code::kTransport, "verbs: " + verbs_missing());
}

Status VerbsTransport::create(int, int, const std::vector<VerbsPort>&, const verbs::Api&,
                              const verbs::RegistrationLimits&, std::unique_ptr<VerbsTransport>*) {
  return Status::error(Code::kTransport, "verbs: " + verbs_missing());
}

}  // namespace pycoll::transport
