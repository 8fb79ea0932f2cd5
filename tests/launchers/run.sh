#!/usr/bin/env bash
# Tests of launchers that need real hosts: network namespaces, sshd. They are not part of `make
# test`, since they take minutes. $1 is the environment's bin folder; further arguments go to
# pytest. A test that cannot run here is skipped with its reason.
set -euo pipefail
cd "$(dirname "$0")/../.."
bin=$1
shift
if ! command -v sshd >/dev/null && [ ! -x /usr/sbin/sshd ] && [ "$(id -u)" = 0 ] &&
  command -v apt-get >/dev/null; then
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq openssh-server openssh-client >/dev/null
fi
"$bin/python" -m pytest -q -rs tests/launchers "$@"
