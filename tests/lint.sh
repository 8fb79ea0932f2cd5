#!/usr/bin/env bash
# Formatters and static checks; every one of them must be silent. $1 is the environment's bin
# folder.
set -euo pipefail
bin=$1
bash "$(dirname "$0")/lint_python.sh" "$bin"
bash "$(dirname "$0")/lint_cpp.sh" "$bin"
echo "lint: clean"
