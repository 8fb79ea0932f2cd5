#!/usr/bin/env bash
# Builds the C++ tests under ASan+UBSan (build/asan, with the fuzz targets) and TSan (build/tsan).
set -euo pipefail
cd "$(dirname "$0")/../.."
for build in build/asan build/tsan; do
  bash tests/cpp/configure.sh "$build"
  cmake --build "$build" --target cpp_tests >>"$build.log" || { cat "$build.log" && exit 1; }
done
cmake --build build/asan --target fuzz >>build/asan.log || { cat build/asan.log && exit 1; }
