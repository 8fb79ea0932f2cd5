#!/usr/bin/env bash
# Installs the Python side of what the tests need into the virtual environment whose bin folder is
# $1.
set -euo pipefail
bin=$1

# Byte code is made of what is imported: of everything in torch and jax it takes a minute.
"$bin/pip" install --quiet --no-compile -r tests/requirements.txt
# lint.sh takes the compile commands from this build, cpp/run.sh its libraries.
"$bin/pip" install --quiet --no-build-isolation --editable . \
  --config-settings=build-dir=build/python --config-settings=cmake.define.PYCOLL_WERROR=ON \
  --config-settings=cmake.define.PYCOLL_TESTS=ON
