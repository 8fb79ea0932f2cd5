#!/usr/bin/env bash
# Installs pycoll and the Python packages that the tests need into the virtual environment whose bin
# folder is $1.
set -euo pipefail
bin=$1

# No byte code: most modules of these packages are never imported; see all.sh for the others.
"$bin/pip" install --quiet --no-compile -r tests/requirements.txt
# cpp/run.sh uses the libraries of this build.
"$bin/pip" install --quiet --no-build-isolation --editable . \
  --config-settings=build-dir=build/python --config-settings=cmake.define.PYCOLL_WERROR=ON \
  --config-settings=cmake.define.PYCOLL_TESTS=ON \
  --config-settings=cmake.define.PYCOLL_CUDA_CACHE="$PWD/build/cubins"
