#!/usr/bin/env bash
# Configures one of the two instrumented builds of the C++ tests, build/asan or build/tsan; the fuzz
# targets lie in the first.
set -euo pipefail
case $1 in
  build/asan) sanitizers=address,undefined fuzz=ON ;;
  build/tsan) sanitizers=thread fuzz=OFF ;;
  *) echo "usage: $0 build/asan|build/tsan" >&2 && exit 2 ;;
esac
mkdir -p build
# Instrumented code compiles several times faster at -O1.
cmake -S . -B "$1" -G Ninja -DCMAKE_CXX_COMPILER=clang++ -DPYCOLL_BINDINGS=OFF -DPYCOLL_TESTS=ON \
  -DPYCOLL_FUZZ="$fuzz" -DPYCOLL_WERROR=ON -DPYCOLL_SANITIZE="$sanitizers" \
  -DCMAKE_CXX_FLAGS_RELEASE=-O1 >"$1.log"
