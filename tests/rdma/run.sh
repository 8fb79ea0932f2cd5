#!/usr/bin/env bash
# Tests verbs on devices of the kernel's Soft-RoCE, in a virtual machine (guest.py). Installs QEMU,
# as root and with apt; kernel and tools are downloaded into build/rdma.
set -euo pipefail
bin=$1
shift
if ! command -v qemu-system-x86_64 >/dev/null; then
  if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "missing: qemu-system-x86 (Debian's name); install it" >&2
    exit 1
  fi
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
    qemu-system-x86 >/dev/null
fi
cmake --build build/python --target rdma_conformance >build/rdma.log ||
  { cat build/rdma.log && exit 1; }
exec "$bin/python" tests/rdma/guest.py --timeout 3600 -- "$bin/python" tests/rdma/inside.py "$@"
