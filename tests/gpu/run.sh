#!/usr/bin/env bash
# Everything that needs a GPU, and its figures last. $1 is the environment's bin folder.
set -euo pipefail
bin=$1
export PYTHONPATH=tests:tests/gpu

if ! "$bin/python" -c "
import sys
from test_gpu import has_gpu
from pycoll import _core
print(_core.device_summary())
sys.exit(not has_gpu(_core.device_summary()))"; then
  echo "gpu-check: there is no GPU here, so nothing was checked" >&2
  exit 1
fi
git log -1 --format='commit %h' || true

"$bin/python" -m pytest tests/gpu/test_gpu.py -q -ra
if command -v compute-sanitizer >/dev/null; then
  for tool in memcheck racecheck; do
    compute-sanitizer --tool "$tool" --error-exitcode 1 --target-processes all \
      "$bin/python" -m pytest tests/gpu/on_device.py -q -k "every_collective or in_place"
  done
else
  echo "gpu-check: no compute-sanitizer here" >&2
fi
"$bin/python" bench/gpu.py
