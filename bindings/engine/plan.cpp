#include <span>
#include <string>

#include "bindings/core/errors.h"
#include "bindings/engine/plan.h"
#include "plan/print.h"

namespace pycoll::bindings {
namespace {

PlanHandle load(const py::bytes& data) {
  const std::string_view view = data;
  PlanHandle plan;
  raise_if_failed(
      plan::Image::load(std::as_bytes(std::span(view.data(), view.size())), &plan.image), "plan");
  return plan;
}

}  // namespace

void bind_plan(py::module_& module) {
  using Handle = PlanHandle;
  py::class_<Handle>(module, "Plan", "One rank's validated share of a schedule; immutable.")
      .def(
          py::init(&load), py::arg("data"),
          "Validate plan bytes (csrc/plan/FORMAT.md). Raises InvalidArgumentError naming the first "
          "violation.")
      .def_property_readonly("collective",
                             [](const Handle& plan) { return plan.image->header().collective; })
      .def_property_readonly("size", [](const Handle& plan) { return plan.image->header().size; })
      .def_property_readonly("rank", [](const Handle& plan) { return plan.image->header().rank; })
      .def_property_readonly("root", [](const Handle& plan) { return plan.image->header().root; })
      .def_property_readonly("parts", [](const Handle& plan) { return plan.image->header().parts; })
      .def_property_readonly("lanes",
                             [](const Handle& plan) { return plan.image->header().lane_count; })
      .def_property_readonly("rows",
                             [](const Handle& plan) { return plan.image->plan().rows.size(); })
      .def("__str__", [](const Handle& plan) { return plan::to_text(plan.image->plan()); });
}

}  // namespace pycoll::bindings
