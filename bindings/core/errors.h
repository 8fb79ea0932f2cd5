// Every Status becomes an exception of pycoll.errors here. Code below the bindings uses no
// exceptions and no Python.
#pragma once

#include <pybind11/pybind11.h>

#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace pycoll::bindings {

namespace py = pybind11;

// Throws the exception of pycoll.errors for `status`; returns if it is ok. If a Python error is
// already pending (Ctrl-C during a wait), that error is thrown instead. `names`: "host:pid" of the
// ranks, from which the exception gets its host. Requires: the GIL.
void raise_if_failed(const Status& status, std::string_view operation,
                     const std::vector<std::string>& names = {});

}  // namespace pycoll::bindings
