// A plan as Python holds it: shared and immutable.
#pragma once

#include <memory>

#include "plan/image.h"

namespace pycoll::bindings {

struct PlanHandle {
  std::shared_ptr<const plan::Image> image;
};

}  // namespace pycoll::bindings
