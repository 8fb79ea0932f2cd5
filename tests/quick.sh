#!/usr/bin/env bash
# Checks for a first change, in less than three minutes on two cores: linters of Python, the rules
# of the tree, and the tests that find most faults in little time. $1 is the bin folder.
set -euo pipefail
cd "$(dirname "$0")/.."
bin=$1
bash tests/lint_python.sh "$bin"
"$bin/python" -m pytest -q -n "$(($(nproc) * 3 / 2))" --dist loadfile tests/test_tidy.py tests/api \
  --ignore tests/api/test_soak.py tests/arrays tests/comm tests/gradients \
  tests/regressions/test_groups_and_forgetting.py tests/schedule/test_proof.py \
  tests/algorithms/test_table.py
