#!/usr/bin/env bash
# Tests of launchers that need real hosts (network namespaces, sshd), and of engines and trainers as
# they are. They are not part of `make test`, since they take minutes. $1 is the bin folder of the
# tests' environment; further arguments go to pytest. A test that cannot run here is skipped with
# its reason.
#
# Engines go into an environment of their own, $LAUNCHERS_VENV (build/launchers-venv), which sees
# the tests' packages. SPARK=0 leaves out Spark, which is 456 MB; ENGINES=0 leaves out all of them.
set -euo pipefail
cd "$(dirname "$0")/../.."
bin=$(cd "$1" && pwd)
shift
engines=(dask_workers kubernetes_schemas pages ray_cluster spark_stage trainers)

if ! command -v sshd >/dev/null && [ ! -x /usr/sbin/sshd ] && [ "$(id -u)" = 0 ] &&
  command -v apt-get >/dev/null; then
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq openssh-server openssh-client >/dev/null
fi
if ! command -v slurmctld >/dev/null && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
    slurm-wlm munge libpmix2 libpmix-dev >/dev/null || true # its tests say what is missing
fi
# A selection in the arguments may leave no test to run: status 5.
others=("${engines[@]/#/--ignore-glob=*test_}")
"$bin/python" -m pytest -q -rs tests/launchers "${others[@]/%/.py}" "$@" ||
  [ $? = 5 ]
if [ "${ENGINES:-1}" = 0 ]; then
  echo "skipped: engines and trainers (ENGINES=0)"
  exit
fi

own=${LAUNCHERS_VENV:-build/launchers-venv}
[ -x "$own/bin/python" ] || "$bin/python" -m venv "$own"
purelib=$("$bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
site=$("$own/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
echo "import site; site.addsitedir('$purelib')" >"$site/tests_environment.pth"
"$own/bin/pip" install --quiet -r tests/launchers/requirements.txt
skipped=()
# Its set-up imports torch. DeepSpeed compiles what a program needs when that starts.
DS_BUILD_OPS=0 "$own/bin/pip" install --quiet --no-build-isolation deepspeed==0.19.8 ||
  skipped+=("DeepSpeed: deepspeed 0.19.8 cannot be installed")
if [ "${SPARK:-1}" = 0 ]; then
  skipped+=("Spark: SPARK=0")
elif ! command -v java >/dev/null; then
  skipped+=("Spark: no java (apt: default-jre-headless)")
elif ! "$own/bin/pip" install --quiet pyspark==4.3.0; then
  skipped+=("Spark: pyspark 4.3.0 cannot be installed")
fi
# One engine at a time: each starts several processes.
files=("${engines[@]/#/tests/launchers/test_}")
"$own/bin/python" -m pytest -q -rs --timeout 600 "${files[@]/%/.py}" "$@" || [ $? = 5 ]
for one in "${skipped[@]}"; do echo "skipped: $one"; done
