// What the files of the transport conformance suite are to transport_conformance.cpp: lists of
// cases.
#pragma once

#include <vector>

#include "tests/cpp/transport/conformance/transport_conformance.h"

namespace pycoll::conformance {

struct Case {
  const char* name;
  void (*run)(const Medium& medium);
};

// The contract (transport.h), for every medium.
std::vector<Case> cases_about_segments();
std::vector<Case> cases_about_links();
// For media with descriptors only (Medium::threads).
std::vector<Case> cases_about_sleep();
// The abilities that the medium has (capabilities.h), and that it has no other.
std::vector<Case> cases_about_capabilities(const Abilities& has);
std::vector<Case> cases_about_multicast();

}  // namespace pycoll::conformance

#define PYCOLL_CASE(function) {#function, &function}
