#!/usr/bin/env bash
# Builds and runs the C++ tests three times: as they are, under ASan+UBSan, under TSan. Nothing is
# suppressed. Builds lie in build/cpp-*.
set -euo pipefail
export ASAN_OPTIONS=detect_leaks=1 UBSAN_OPTIONS=print_stacktrace=1 TSAN_OPTIONS=halt_on_error=1

run() {
  local name=$1 compiler=$2 level=$3 sanitizers=$4 without=$5
  local build=build/cpp-$name
  echo "C++ tests: $name ($compiler)"
  cmake -S . -B "$build" -G Ninja -DCMAKE_CXX_COMPILER="$compiler" -DPYCOLL_BINDINGS=OFF \
    -DPYCOLL_TESTS=ON -DPYCOLL_WERROR=ON -DPYCOLL_SANITIZE="$sanitizers" \
    -DCMAKE_CXX_FLAGS_RELEASE="$level" >"$build.log"
  cmake --build "$build" >>"$build.log" || { cat "$build.log" && exit 1; }
  ctest --test-dir "$build" --output-on-failure --no-tests=error \
    --exclude-regex "$without"
}

mkdir -p build
# Instrumented code compiles several times faster at -O1.
run plain g++ "-O3 -DNDEBUG" "" none
run asan clang++ -O1 address,undefined none
# In these there is one thread only.
run tsan clang++ -O1 thread "^(bound_plan|descriptor|frame|kernels|plan|sim|verdict)_"
