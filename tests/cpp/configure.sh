#!/usr/bin/env bash
# Configures one of the two instrumented builds of the C++ tests, build/asan or build/tsan.
# build/asan also has the fuzz targets.
set -euo pipefail
case $1 in
  build/asan) options=(-DPYCOLL_SANITIZE=address,undefined -DPYCOLL_FUZZ=ON) ;;
  # Kernels have no threads. One instruction set is enough to see races on the data that they read.
  build/tsan) options=(-DPYCOLL_SANITIZE=thread -DPYCOLL_VECTORS=OFF) ;;
  *) echo "usage: $0 build/asan|build/tsan" >&2 && exit 2 ;;
esac
mkdir -p build
# Instrumented code compiles several times faster at -O1.
cmake -S . -B "$1" -G Ninja -DCMAKE_CXX_COMPILER=clang++ -DPYCOLL_BINDINGS=OFF -DPYCOLL_TESTS=ON \
  -DPYCOLL_WERROR=ON -DPYCOLL_CUDA=OFF -DCMAKE_CXX_FLAGS_RELEASE=-O1 "${options[@]}" >"$1.log"
