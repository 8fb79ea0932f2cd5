#!/usr/bin/env bash
# Installs the system packages that the tests need, as root and with apt; else lists the missing
# ones and fails.
set -euo pipefail
python=$1

missing=()
needs() { command -v "$1" >/dev/null || missing+=("$2"); }
needs clang++ clang
needs ninja ninja-build
needs cmake cmake
needs g++ g++
needs ip iproute2
[ -e /usr/include/infiniband/verbs.h ] || missing+=(libibverbs-dev)
# The runtimes of the sanitizers and of libFuzzer are packaged separately from clang.
echo 'int main(){}' | clang++ -x c++ -fsanitize=address - -o /dev/null 2>/dev/null ||
  missing+=(libclang-rt-dev)
"$python" -c 'import os, sys, sysconfig
sys.exit(not os.path.exists(os.path.join(sysconfig.get_paths()["include"], "Python.h")))' ||
  missing+=(python3-dev)
# One test compares with the headers of libpmix, where Debian has them; it is skipped without them.
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  compgen -G '/usr/lib/*/pmix2/include' >/dev/null || missing+=(libpmix-dev)
fi
if [ ${#missing[@]} -gt 0 ]; then
  if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "missing: ${missing[*]} (Debian's names); install them" >&2
    exit 1
  fi
  echo "installing ${missing[*]}"
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "${missing[@]}" >/dev/null
fi
