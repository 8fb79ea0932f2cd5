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
# failure. clang-tidy needs the compile commands of the installed build. The tests under TSan run
# one after the other beside the Python tests, which leave about half a core.
setsid bash -euc 'chrt --idle 0 bash tests/cpp/build.sh; JOBS=1 bash tests/cpp/run.sh threads' \
  >build/cpp.log 2>&1 &
sanitized=$!
trap 'kill -- "-$sanitized" "-${linted:-$sanitized}" 2>/dev/null || true' EXIT

bash tests/setup.sh "$bin"
setsid chrt --idle 0 bash -euc \
  'cmake --build build/python --target cpp_tests; bash tests/lint_cpp.sh "$1"' - "$bin" \
  >build/python.log 2>&1 &
linted=$!
bash tests/lint_python.sh "$bin"
bash tests/python.sh "$bin"
wait "$linted" || { cat build/python.log && exit 1; }
wait "$sanitized" || { cat build/cpp.log && exit 1; }
echo "lint and builds of C++: clean"
sed -n '/^C++ tests/,$p' build/cpp.log
bash tests/cpp/run.sh installed
bash tests/cpp/run.sh addresses
bash tests/fuzz/run.sh
