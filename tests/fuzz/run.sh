#!/usr/bin/env bash
# Runs every fuzz target for FUZZ_SECONDS (default 10) on its corpus; the canary must be caught.
set -euo pipefail
seconds=${FUZZ_SECONDS:-10}
log=build/fuzz.log
mkdir -p build
cmake -S . -B build/fuzz -G Ninja -DCMAKE_CXX_COMPILER=clang++ -DPYCOLL_BINDINGS=OFF \
  -DPYCOLL_FUZZ=ON -DPYCOLL_WERROR=ON -DCMAKE_CXX_FLAGS_RELEASE=-O1 >"$log"
cmake --build build/fuzz --target fuzz >>"$log" || { cat "$log" && exit 1; }

for target in build/fuzz/tests/fuzz/fuzz_*; do
  [ -x "$target" ] && [ -f "$target" ] || continue
  name=$(basename "$target")
  if [ "$name" = fuzz_canary ]; then
    if "$target" -max_total_time=20 -artifact_prefix=build/fuzz/ >/dev/null 2>&1; then
      echo "fuzz_canary was not caught: failures would go unseen" >&2
      exit 1
    fi
    echo "fuzz_canary: caught, as it must be"
    continue
  fi
  corpus=build/fuzz/corpus-${name#fuzz_}
  mkdir -p "$corpus"
  if ! "$target" -max_total_time="$seconds" -timeout=10 -artifact_prefix=build/fuzz/ "$corpus" \
    "tests/fuzz/corpus/${name#fuzz_}" >"build/fuzz/$name.log" 2>&1; then
    tail -40 "build/fuzz/$name.log" >&2
    exit 1
  fi
  grep -E '^Done' "build/fuzz/$name.log" || true
  echo "$name: no failure in ${seconds} s"
done
