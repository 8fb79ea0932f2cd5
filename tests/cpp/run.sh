#!/usr/bin/env bash
# Builds and runs the C++ tests under ASan+UBSan and under TSan, with nothing suppressed; before,
# those of kernels and devices against the libraries of the installed extension (build/python),
# since optimized code could give other bits.
set -euo pipefail
export ASAN_OPTIONS=detect_leaks=1 UBSAN_OPTIONS=print_stacktrace=1 TSAN_OPTIONS=halt_on_error=1

# Half of what the tests do is to wait.
run() {
  ctest --test-dir "$1" --parallel 2 --output-on-failure --no-tests=error
}

echo "C++ tests: as installed"
cmake --build build/python --target cpp_tests >build/python.log ||
  { cat build/python.log && exit 1; }
run build/python
bash "$(dirname "$0")/build.sh"
echo "C++ tests: address and undefined behaviour"
run build/asan
echo "C++ tests: threads"
run build/tsan
