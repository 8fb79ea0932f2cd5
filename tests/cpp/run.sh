#!/usr/bin/env bash
# Builds and runs the C++ tests three times: against the libraries of the installed extension
# (build/python), under ASan+UBSan, under TSan. Nothing is suppressed.
set -euo pipefail
export ASAN_OPTIONS=detect_leaks=1 UBSAN_OPTIONS=print_stacktrace=1 TSAN_OPTIONS=halt_on_error=1
here=$(dirname "$0")

run() {
  local build=$1 without=$2
  cmake --build "$build" --target cpp_tests >>"$build.log" || { cat "$build.log" && exit 1; }
  # Half of what the tests do is to wait.
  ctest --test-dir "$build" --parallel 2 --output-on-failure --no-tests=error \
    --exclude-regex "$without"
}

echo "C++ tests: as installed"
: >build/python.log
run build/python none
echo "C++ tests: address and undefined behaviour"
bash "$here/configure.sh" build/asan
run build/asan none
echo "C++ tests: threads"
bash "$here/configure.sh" build/tsan
# In these there is one thread only.
run build/tsan "^(bound_plan|descriptor|frame|kernels|plan|sim|verdict)_"
