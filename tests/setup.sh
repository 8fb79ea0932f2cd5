#!/usr/bin/env bash
# Installs the Python side of what the tests need into the virtual environment whose bin folder is
# $1.
set -euo pipefail
bin=$1

"$bin/pip" install --quiet -r tests/requirements.txt
# lint.sh takes the compile commands from this build, cpp/run.sh its libraries.
"$bin/pip" install --quiet --no-build-isolation --editable . \
  --config-settings=build-dir=build/python --config-settings=cmake.define.PYCOLL_WERROR=ON \
  --config-settings=cmake.define.PYCOLL_TESTS=ON
