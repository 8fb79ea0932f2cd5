#!/usr/bin/env bash
# Runs every fuzz target for FUZZ_SECONDS (default 10) on its corpus. The canary is a target with a
# planted fault, which the fuzzer must find.
set -euo pipefail
seconds=${FUZZ_SECONDS:-10}
log=build/fuzz.log
bash "$(dirname "$0")/../cpp/configure.sh" build/asan
mkdir -p build/fuzz
cmake --build build/asan --target fuzz >"$log" || { cat "$log" && exit 1; }

# Runs one target for its time, the canary until the fuzzer has found its fault.
fuzz() {
  local name
  name=$(basename "$1")
  if [ "$name" = fuzz_canary ]; then
    if "$1" -max_total_time=20 -artifact_prefix=build/fuzz/ >/dev/null 2>&1; then
      echo "fuzz_canary was not caught: other failures would not be found either" >&2
      return 1
    fi
    echo "fuzz_canary: caught, as it must be"
    return
  fi
  local corpus=build/fuzz/corpus-${name#fuzz_}
  mkdir -p "$corpus"
  if ! "$1" -max_total_time="$seconds" -timeout=10 -artifact_prefix=build/fuzz/ "$corpus" \
    "tests/fuzz/corpus/${name#fuzz_}" >"build/fuzz/$name.log" 2>&1; then
    grep -A 20 "^$name: " "build/fuzz/$name.log" >&2 || true # the reason precedes the stack
    tail -n 40 "build/fuzz/$name.log" >&2
    return 1
  fi
  grep -E '^Done' "build/fuzz/$name.log" || true
  echo "$name: no failure in ${seconds} s"
}

export seconds
export -f fuzz
find build/asan/tests/fuzz -maxdepth 1 -name 'fuzz_*' -type f -executable -print0 |
  xargs -0 -P "$(nproc)" -I{} bash -euo pipefail -c 'fuzz {}'
