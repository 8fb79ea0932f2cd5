#!/usr/bin/env bash
# Installs the Python side of what the tests need into the virtual environment whose bin folder is
# $1.
set -euo pipefail
bin=$1

# Byte code is made where it is needed, see all.sh: most modules of these packages never are.
"$bin/pip" install --quiet --no-compile -r tests/requirements.txt
# cpp/run.sh takes the libraries of this build.
"$bin/pip" install --quiet --no-build-isolation --editable . \
  --config-settings=build-dir=build/python --config-settings=cmake.define.PYCOLL_WERROR=ON \
  --config-settings=cmake.define.PYCOLL_TESTS=ON
