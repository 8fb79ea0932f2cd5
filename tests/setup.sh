#!/usr/bin/env bash
# Installs what the tests need: system packages where we are root and apt is there, then the Python
# side into the virtual environment whose bin folder is $1. Says what it could not install.
set -euo pipefail
bin=$1

# What is missing, as names of Debian packages.
missing=()
needs() { command -v "$1" >/dev/null || missing+=("$2"); }
needs clang++ clang
needs ninja ninja-build
needs cmake cmake
needs g++ g++
needs ip iproute2
# The sanitizers' and libFuzzer's runtimes come apart from clang itself.
echo 'int main(){}' | clang++ -x c++ -fsanitize=address - -o /dev/null 2>/dev/null ||
  missing+=(libclang-rt-dev)
"$bin/python" -c 'import os, sys, sysconfig
sys.exit(not os.path.exists(os.path.join(sysconfig.get_paths()["include"], "Python.h")))' ||
  missing+=(python3-dev)
if [ ${#missing[@]} -gt 0 ]; then
  if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "missing: ${missing[*]} (Debian's names); install them" >&2
    exit 1
  fi
  echo "installing ${missing[*]}"
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "${missing[@]}" >/dev/null
fi

"$bin/pip" install --quiet -r tests/requirements.txt
# lint.sh takes the compile commands from this build, cpp/run.sh its libraries.
"$bin/pip" install --quiet --no-build-isolation --editable . \
  --config-settings=build-dir=build/python --config-settings=cmake.define.PYCOLL_WERROR=ON \
  --config-settings=cmake.define.PYCOLL_TESTS=ON
