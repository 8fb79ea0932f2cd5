#include "tests/cpp/transport/conformance/transport_conformance.h"

#include "tests/cpp/transport/conformance/conformance_cases.h"

namespace pycoll::conformance {

Conformance::Conformance(const Medium& medium) {
  const auto add = [&](const std::vector<Case>& cases) {
    for (const Case& one : cases) {
      testing::cases().push_back(
          {medium.prefix + one.name, [medium, run = one.run] { run(medium); }});
    }
  };
  add(cases_about_segments());
  add(cases_about_links());
  if (medium.threads) add(cases_about_sleep());
  add(cases_about_capabilities(medium.has));
}

}  // namespace pycoll::conformance
