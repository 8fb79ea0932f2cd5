#!/usr/bin/env bash
# Sets everything up and runs all tests; what fails first is found soonest. $1 is the environment's
# bin folder.
set -euo pipefail
bin=$1
mkdir -p build
# Hundreds of processes import the same modules; the first one leaves their byte code to the others.
unset PYTHONDONTWRITEBYTECODE
bash tests/packages.sh "$bin/python"

# On time that nobody else wants: pip unpacks on one core, and ranks wait for each other.
# A session of their own, so that nothing of them outlives a failure.
setsid chrt --idle 0 bash tests/cpp/build.sh >build/cpp.log 2>&1 &
builds=$!
trap 'kill -- "-$builds" 2>/dev/null || true' EXIT

bash tests/setup.sh "$bin"
bash tests/lint.sh "$bin"
# A file stays with one worker: tests of a file share worlds of ranks.
"$bin/python" -m pytest tests -n auto --dist loadfile -q
wait "$builds" || { cat build/cpp.log && exit 1; }
bash tests/cpp/run.sh
bash tests/fuzz/run.sh
