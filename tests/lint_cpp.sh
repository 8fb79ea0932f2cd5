#!/usr/bin/env bash
# Formatter and static checks of C++; every one of them must be silent. $1 is the environment's bin
# folder. clang-tidy follows the compile commands of the editable install in build/python.
set -euo pipefail
bin=$1

find csrc bindings tests -name '*.h' -print0 -o -name '*.cpp' -print0 |
  xargs -0 "$bin/clang-format" --dry-run --Werror

# GCC has warnings that clang does not know. The stderr of clang-tidy ("1234 warnings generated") is
# shown only if it fails.
tidy() {
  xargs -P "$(nproc)" -n 1 "$bin/clang-tidy" --quiet -p build/python \
    --extra-arg=-Wno-unknown-warning-option --extra-arg=-Wno-ignored-gch "$@" \
    2>build/clang-tidy.log || {
    grep -i -e error build/clang-tidy.log >&2 || true
    exit 1
  }
}
# Sources are checked in the batches in which they were compiled, since headers take much of the
# time. The largest batch comes first, so that no core waits for a long one at the end. The bindings
# are checked without clang's analyzer, which understands neither Python's references nor pybind11.
# In a batch clang attributes libstdc++'s own use of a deprecated function to the batch.
batches() {
  local batch
  find "$1" -name 'unity_*.cxx' | while read -r batch; do
    echo "$(sed -n 's/^#include "\(.*\)"/\1/p' "$batch" | xargs cat | wc -c) $batch"
  done | sort -rn | cut -d' ' -f2
}
batches build/python/bindings |
  tidy --extra-arg=-Wno-deprecated-declarations \
    '--checks=-bugprone-suspicious-include,-clang-analyzer-*'
echo bindings/module.cpp | tidy '--checks=-clang-analyzer-*'
# The option makes the analyzer check the files that a batch includes, too. It follows a function
# for TIDY_NODES steps; its default bound of 225000 is slower and has found nothing more.
analyzer=()
for word in -analyzer-opt-analyze-headers -analyzer-config "max-nodes=${TIDY_NODES:-40000}"; do
  analyzer+=(--extra-arg=-Xclang "--extra-arg=$word")
done
batches build/python/csrc |
  tidy --extra-arg=-Wno-deprecated-declarations "${analyzer[@]}" \
    --checks=-bugprone-suspicious-include
# Sources that are compiled alone, or not on this machine. Then unused using-declarations and
# aliases: these checks need one file at a time.
printf '%s\n' csrc/device/kernels/cuda.cpp $(find csrc -name 'no_*.cpp') | tidy "${analyzer[@]}"
grep -rlE --include='*.cpp' '^ *(using [a-z_:]+::[A-Za-z_]+;|namespace [a-z_]+ = )' csrc |
  tidy '--checks=-*,misc-unused-using-decls,misc-unused-alias-decls'
