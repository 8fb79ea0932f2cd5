#!/usr/bin/env bash
# Runs the tests in Python, several files at once: in one process they take many times as long,
# since each leaves its imports and pools to those behind it. $1 is the environment's bin folder,
# what follows the tests to run: all if nothing does.
#
# A file stays with one worker: tests of a file share worlds of ranks. Many wait for what ranks do
# late or never, so there are half as many workers again as cores. See conftest.py for the order.
set -euo pipefail
cd "$(dirname "$0")/.."
bin=$1
shift
workers=$(($(nproc) * 3 / 2))
"$bin/python" -m pytest "${@:-tests}" -n $workers --dist loadfile --no-loadscope-reorder -q
