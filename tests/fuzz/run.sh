#!/usr/bin/env bash
# Runs every fuzz target for FUZZ_SECONDS (default 10) on its corpus; the canary must be caught.
set -euo pipefail
seconds=${FUZZ_SECONDS:-10}
log=build/fuzz.log
bash "$(dirname "$0")/../cpp/configure.sh" build/asan
mkdir -p build/fuzz
cmake --build build/asan --target fuzz >"$log" || { cat "$log" && exit 1; }

for target in build/asan/tests/fuzz/fuzz_*; do
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
