#!/usr/bin/env bash
# Sets everything up and runs all tests, in an order that finds failures early. $1 is the
# environment's bin folder.
set -euo pipefail
bin=$1
mkdir -p build
# Hundreds of processes import the same modules; the first one writes byte code for the others.
unset PYTHONDONTWRITEBYTECODE
bash tests/packages.sh "$bin/python"

# Builds and clang-tidy use idle processor time only: pip unpacks on one core, and ranks often wait
# for each other. Each has its own session, so that the trap can end all its processes after a
# failure. clang-tidy needs the compile commands of the installed build.
setsid bash tests/when_idle.sh bash tests/cpp/build.sh >build/cpp.log 2>&1 &
sanitized=$!
trap 'kill -- "-$sanitized" "-${linted:-$sanitized}" 2>/dev/null || true' EXIT

bash tests/setup.sh "$bin"
setsid bash tests/when_idle.sh bash -euc \
  'cmake --build build/python --target cpp_tests; bash tests/lint_cpp.sh "$1"' - "$bin" \
  >build/python.log 2>&1 &
linted=$!
bash tests/lint_python.sh "$bin"
bash tests/python.sh "$bin"
wait "$linted" || { cat build/python.log && exit 1; }
wait "$sanitized" || { cat build/cpp.log && exit 1; }
echo "lint and builds of C++: clean"
bash tests/cpp/run.sh
bash tests/fuzz/run.sh
