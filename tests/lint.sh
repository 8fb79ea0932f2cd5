#!/usr/bin/env bash
# Formatters and static checks; every one of them must be silent. $1 is the environment's bin
# folder. clang-tidy follows the compile commands of build/tidy, where nothing is built.
set -euo pipefail
bin=$1

"$bin/ruff" check pycoll tests bench examples
"$bin/ruff" format --check --quiet pycoll tests bench examples
"$bin/mypy"
find csrc bindings tests -name '*.h' -print0 -o -name '*.cpp' -print0 |
  xargs -0 "$bin/clang-format" --dry-run --Werror

# File by file: in a batch, clang's analyzer would look at nothing but the batch itself.
mkdir -p build
cmake -S . -B build/tidy -G Ninja -DCMAKE_UNITY_BUILD=OFF -DCMAKE_DISABLE_PRECOMPILE_HEADERS=ON \
  -DPython_EXECUTABLE="$bin/python" -Dpybind11_DIR="$("$bin/python" -m pybind11 --cmakedir)" \
  >build/tidy.log || { cat build/tidy.log && exit 1; }
# GCC knows warnings that clang does not. Largest first, so that no core waits for a straggler.
# What clang-tidy says on stderr ("1234 warnings generated") matters only if it fails.
# The analyzer follows a function for TIDY_NODES steps; its own bound, 225000, takes four times as
# long and has found nothing more.
analyzer=(--extra-arg=-Xclang --extra-arg=-analyzer-config --extra-arg=-Xclang
  "--extra-arg=max-nodes=${TIDY_NODES:-40000}")
log=build/clang-tidy.log
if ! find csrc bindings -name '*.cpp' -size +0 -printf '%s %p\n' | sort -rn | cut -d' ' -f2 |
  grep -v -e no_x86 | xargs -P "$(nproc)" -n 1 "$bin/clang-tidy" --quiet -p build/tidy \
  --extra-arg=-Wno-unknown-warning-option "${analyzer[@]}" 2>"$log"; then
  grep -i -e error "$log" >&2 || true
  exit 1
fi
echo "lint: clean"
