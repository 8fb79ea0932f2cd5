#!/usr/bin/env bash
# Builds and runs the C++ tests. First come the tests of kernels and devices with the libraries of
# the installed extension (build/python), since optimized code could give other bits. Then all tests
# run under ASan+UBSan and under TSan, without suppressions.
set -euo pipefail
export ASAN_OPTIONS=detect_leaks=1 UBSAN_OPTIONS=print_stacktrace=1 TSAN_OPTIONS=halt_on_error=1

# The tests often wait, so they run in parallel.
run() {
  ctest --test-dir "$1" --parallel "$(nproc)" --output-on-failure --no-tests=error
}

echo "C++ tests: as installed"
cmake --build build/python --target cpp_tests >build/python.log ||
  { cat build/python.log && exit 1; }
run build/python
bash "$(dirname "$0")/build.sh"
# Both builds run at once: each has a long test that mostly waits.
run build/asan >build/asan-tests.log 2>&1 &
asan=$!
trap 'kill "$asan" 2>/dev/null || true' EXIT
echo "C++ tests: threads"
run build/tsan
echo "C++ tests: address and undefined behaviour"
wait "$asan" || { cat build/asan-tests.log && exit 1; }
cat build/asan-tests.log
