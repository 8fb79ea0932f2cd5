// Whether a tensor's values are those of its memory negated, which torch puts off until somebody
// computes with them. Its is_neg() takes as long as all else that is read of a tensor, so the
// tensor itself is looked at, where examples have shown how it tells. Requires everywhere: the GIL.
#pragma once

#include <pybind11/pybind11.h>

#include <optional>

namespace pycoll::bindings {

// nullopt: not to be seen, so that its is_neg() has to be asked. Requires: `tensor` is of a class
// of the examples'.
[[nodiscard]] std::optional<bool> sees_negation(PyObject* tensor);

void bind_negation(pybind11::module_& module);

}  // namespace pycoll::bindings
