#!/usr/bin/env bash
# Formatters and static checks; every one of them must be silent. $1 is the environment's bin
# folder. clang-tidy follows the compile commands of the editable install in build/python, and of
# build/tidy, where nothing is built.
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
  xargs -P "$(nproc)" -n 1 "$bin/clang-tidy" --quiet --extra-arg=-Wno-unknown-warning-option \
    --extra-arg=-Wno-ignored-gch "$@" 2>build/clang-tidy.log || {
    grep -i -e error build/clang-tidy.log >&2 || true
    exit 1
  }
}
# The bindings in the batches in which they were compiled, since pybind11's headers take most of
# the time; clang's analyzer, which looks at nothing that a batch includes, knows nothing of
# Python's references anyway. In a batch clang takes libstdc++'s own use of a deprecated function
# for ours.
find build/python/bindings -name 'unity_*.cxx' |
  tidy -p build/python --extra-arg=-Wno-deprecated-declarations \
  '--checks=-bugprone-suspicious-include,-clang-analyzer-*'
# The rest file by file, largest first, so that no core waits for a straggler. The analyzer follows
# a function for TIDY_NODES steps; its own bound, 225000, takes four times as long and has found
# nothing more.
cmake -S . -B build/tidy -G Ninja -DCMAKE_UNITY_BUILD=OFF -DPYCOLL_BINDINGS=OFF \
  >build/tidy.log || { cat build/tidy.log && exit 1; }
find csrc -name '*.cpp' -size +0 -printf '%s %p\n' | sort -rn | cut -d' ' -f2 |
  grep -v -e no_x86 | tidy -p build/tidy --extra-arg=-Xclang --extra-arg=-analyzer-config \
  --extra-arg=-Xclang "--extra-arg=max-nodes=${TIDY_NODES:-40000}"
echo "lint: clean"
