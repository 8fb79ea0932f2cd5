#!/usr/bin/env bash
# Runs the C++ tests. "installed": builds the tests of kernels and devices with the libraries of the
# installed extension (build/python), since optimized code could give other bits, and runs them.
# "threads": runs all tests under TSan, "addresses": under ASan+UBSan, without suppressions. Without
# an argument all three run, after the two builds. JOBS is how many tests of a part run at once.
set -euo pipefail
cd "$(dirname "$0")/../.."
export ASAN_OPTIONS=detect_leaks=1 UBSAN_OPTIONS=print_stacktrace=1 TSAN_OPTIONS=halt_on_error=1

# The tests often wait, so they run in parallel.
run() {
  ctest --test-dir "$1" --parallel "${JOBS:-$(nproc)}" --output-on-failure --no-tests=error
}

case ${1:-all} in
  installed)
    echo "C++ tests: as installed"
    cmake --build build/python --target cpp_tests >build/python.log ||
      { cat build/python.log && exit 1; }
    run build/python
    ;;
  threads)
    echo "C++ tests: threads"
    run build/tsan
    ;;
  addresses)
    echo "C++ tests: address and undefined behaviour"
    run build/asan
    ;;
  all)
    bash tests/cpp/run.sh installed
    bash tests/cpp/build.sh
    # Both builds run at once: each has a long test that mostly waits.
    bash tests/cpp/run.sh addresses >build/asan-tests.log 2>&1 &
    asan=$!
    trap 'kill "$asan" 2>/dev/null || true' EXIT
    bash tests/cpp/run.sh threads
    wait "$asan" || { cat build/asan-tests.log && exit 1; }
    cat build/asan-tests.log
    ;;
  *) echo "usage: $0 [installed|threads|addresses]" >&2 && exit 2 ;;
esac
