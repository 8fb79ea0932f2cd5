#!/usr/bin/env bash
# Runs the tests of torch with another version of torch. $1 is the bin folder of an environment in
# which pycoll and the packages of the tests are installed, $2 the version, such as 2.14.1. Further
# arguments are the tests to run; by default all that use torch, the examples included.
#
# The version goes into an environment of its own in build/, whose packages come before those of the
# first environment. It stays there for the next run.
set -euo pipefail
cd "$(dirname "$0")/../.."
bin=$(cd "$1" && pwd)
version=$2
shift 2
own=build/torch-$version

if ! [ -f "$own/complete" ]; then
  rm -rf "$own"
  "$bin/python" -m venv "$own"
  # No byte code: most modules are never imported.
  "$own/bin/pip" install --quiet --no-compile "torch==$version"
  touch "$own/complete"
fi
site_of() { "$1/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])'; }
echo "import site; site.addsitedir('$(site_of "$bin")')" >"$(site_of "$own/bin")/pycoll_tests.pth"

found=$("$own/bin/python" -c 'import torch; print(torch.__version__)')
if [ "${found%%+*}" != "$version" ]; then
  echo "torch is $found in $own, expected $version: remove that folder" >&2
  exit 1
fi
echo "torch $found"
if [ $# -eq 0 ]; then
  set -- tests/torch tests/gradients/test_average.py tests/bootstrap/test_torch_place.py \
    tests/arrays/test_{arrays,negated_tensors}.py tests/regressions/torch \
    tests/comm/test_{bound_calls,calls,groups,in_place,lists,messages}.py
fi
bash tests/python.sh "$own/bin" "$@"
