#!/usr/bin/env bash
# Builds pycoll with profile-guided optimization into the virtual environment whose bin folder is
# $1. A first build records a profile while rehearsal.py runs; the second build is compiled with it.
# Needs GCC, and the packages that `make setup-test` installs.
set -euo pipefail
cd "$(dirname "$0")/.."
bin=$1
build=build/optimized

round() {
  "$bin/pip" install --quiet --no-build-isolation --editable . \
    --config-settings=build-dir=$build --config-settings=cmake.define.PYCOLL_PROFILE="$1" \
    --config-settings=cmake.define.PYCOLL_CUDA_CACHE="$PWD/build/cubins"
}

rm -rf $build/profile
round generate
for ranks in 1 2 8; do
  "$bin/pycoll" run -n $ranks -- "$bin/python" bench/rehearsal.py
done
round use
