#include "engine/stream_operations.h"

namespace pycoll::engine {

Status StreamOperations::look(const std::string& operation, bool patient) const {
  if (Status status = driver_.foreign(); !status.ok()) return status;
  const std::lock_guard<Gate> lock(driver_.gate());
  driver_.engine().look_on_stream(operation, patient);
  driver_.tell_ended();
  return driver_.engine().failure();
}

Status StreamOperations::fail(const Status& status, const std::string& operation,
                              double after) const {
  if (Status wrong = driver_.foreign(); !wrong.ok()) return wrong;
  const std::lock_guard<Gate> lock(driver_.gate());
  driver_.engine().fail_on_stream(status, operation, after);
  driver_.tell_ended();
  return driver_.engine().failure();
}

}  // namespace pycoll::engine
