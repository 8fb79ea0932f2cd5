#!/usr/bin/env bash
# Runs the Python tests, several files at once. In one process they are much slower, since imports
# and pools of earlier tests stay. $1 is the environment's bin folder; further arguments are the
# tests to run, all by default.
#
# One worker runs all tests of a file, since they share worlds of ranks. Many tests wait for ranks
# that are late or never come, so there are 3 workers for every 2 cores. See conftest.py for the
# order.
set -euo pipefail
cd "$(dirname "$0")/.."
bin=$1
shift
workers=$(($(nproc) * 3 / 2))
# Tests of launchers over several hosts run apart: make test-launchers.
[ $# -gt 0 ] || set -- tests --ignore tests/launchers
"$bin/python" -m pytest "$@" -n $workers --dist loadfile --no-loadscope-reorder -q
