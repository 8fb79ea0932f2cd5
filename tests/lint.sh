#!/usr/bin/env bash
# Formatters and static checks; every one of them must be silent. $1 is the environment's bin
# folder. clang-tidy follows the compile commands of the editable install in build/python.
set -euo pipefail
bin=$1

"$bin/ruff" check pycoll tests bench examples
"$bin/ruff" format --check --quiet pycoll tests bench examples
"$bin/mypy"
find csrc bindings tests -name '*.h' -print0 -o -name '*.cpp' -print0 |
  xargs -0 "$bin/clang-format" --dry-run --Werror

# GCC knows warnings that clang does not. What clang-tidy says on stderr ("1234 warnings generated")
# matters only if it fails.
tidy() {
  xargs -P "$(nproc)" -n 1 "$bin/clang-tidy" --quiet -p build/python \
    --extra-arg=-Wno-unknown-warning-option --extra-arg=-Wno-ignored-gch "$@" \
    2>build/clang-tidy.log || {
    grep -i -e error build/clang-tidy.log >&2 || true
    exit 1
  }
}
# Sources in the batches in which they were compiled, since headers take much of the time; the batch
# with most in it first, so that no core waits for a straggler. Of the bindings clang's analyzer
# knows nothing: neither of Python's references nor of pybind11. In a batch clang takes libstdc++'s
# own use of a deprecated function for ours.
batches() {
  local batch
  find "$1" -name 'unity_*.cxx' | while read -r batch; do
    echo "$(sed -n 's/^#include "\(.*\)"/\1/p' "$batch" | xargs cat | wc -c) $batch"
  done | sort -rn | cut -d' ' -f2
}
batches build/python/bindings |
  tidy --extra-arg=-Wno-deprecated-declarations \
    '--checks=-bugprone-suspicious-include,-clang-analyzer-*'
# The analyzer looks at what a batch includes as well, if told so. It follows a function for
# TIDY_NODES steps; its own bound, 225000, takes four times as long and has found nothing more.
analyzer=()
for word in -analyzer-opt-analyze-headers -analyzer-config "max-nodes=${TIDY_NODES:-40000}"; do
  analyzer+=(--extra-arg=-Xclang "--extra-arg=$word")
done
batches build/python/csrc |
  tidy --extra-arg=-Wno-deprecated-declarations "${analyzer[@]}" \
    --checks=-bugprone-suspicious-include
# What is compiled alone, or not on this machine; and names that a file takes over, of which these
# checks see no more than the file itself.
printf '%s\n' csrc/device/cuda.cpp csrc/*/no_*.cpp | tidy "${analyzer[@]}"
grep -lE '^ *(using [a-z_:]+::[A-Za-z_]+;|namespace [a-z_]+ = )' csrc/*/*.cpp |
  tidy '--checks=-*,misc-unused-using-decls,misc-unused-alias-decls'
echo "lint: clean"
