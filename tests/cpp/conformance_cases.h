// What the files of the transport conformance suite are to transport_conformance.cpp: lists of
// cases.
#pragma once

#include <vector>

#include "transport_conformance.h"

namespace pycoll::conformance {

struct Case {
  const char* name;
  void (*run)(const Medium& medium);
};

std::vector<Case> cases_about_segments();
std::vector<Case> cases_about_repeats();
std::vector<Case> cases_about_links();
// For media with descriptors only (Medium::threads).
std::vector<Case> cases_about_sleep();

}  // namespace pycoll::conformance

#define PYCOLL_CASE(function) {#function, &function}
