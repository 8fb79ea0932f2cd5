#!/usr/bin/env bash
# Static checks of everything but C++; every one of them must be silent. $1 is the environment's
# bin folder.
set -euo pipefail
bin=$1
"$bin/ruff" check pycoll tests bench examples docs/site
"$bin/ruff" format --check --quiet pycoll tests bench examples docs/site
"$bin/mypy"
"$bin/check-jsonschema" --builtin-schema vendor.github-workflows .github/workflows/*.yml
