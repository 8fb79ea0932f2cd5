#!/usr/bin/env bash
# Sets everything up and runs all tests, in an order that finds failures early. $1 is the
# environment's bin folder.
set -euo pipefail
bin=$1
mkdir -p build
# Hundreds of processes import the same modules; the first one writes byte code for the others.
unset PYTHONDONTWRITEBYTECODE
bash tests/packages.sh "$bin/python"

# These builds use idle processor time only: pip unpacks on one core, and ranks often wait for each
# other. Each build has its own session, so that the trap can end all its processes after a failure.
setsid chrt --idle 0 bash tests/cpp/build.sh >build/cpp.log 2>&1 &
sanitized=$!
trap 'kill -- "-$sanitized" "-${installed:-$sanitized}" 2>/dev/null || true' EXIT

bash tests/setup.sh "$bin"
setsid chrt --idle 0 cmake --build build/python --target cpp_tests >build/python.log 2>&1 &
installed=$!
bash tests/lint.sh "$bin"
bash tests/python.sh "$bin"
wait "$installed" || { cat build/python.log && exit 1; }
wait "$sanitized" || { cat build/cpp.log && exit 1; }
bash tests/cpp/run.sh
bash tests/fuzz/run.sh
