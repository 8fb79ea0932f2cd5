// The type pycoll.Work: how Python waits for one. Requires everywhere: the GIL.
#pragma once

#include "bindings/core/work_object.h"

namespace pycoll::bindings {

void bind_work(pybind11::module_& module);

}  // namespace pycoll::bindings
