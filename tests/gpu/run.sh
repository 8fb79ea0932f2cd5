#!/usr/bin/env bash
# Runs all tests and benchmarks that need a GPU, within a time limit and without a network. Every
# step has its own time limit, and the other steps run also after one fails or hangs. A table of all
# steps and the figures come last. $1 is the Python whose packages are used (numpy, pytest, pybind11
# and so on; CuPy, torch, Numba and JAX if it has them).
#
# LOGS is the folder for the whole outputs (default build/gpu/logs). GPU_CHECK_S is the limit of all
# steps in seconds (default 540). EXTENSION names a file _core that was compiled elsewhere, with the
# kernels and for this Python; then nothing is compiled here.
set -uo pipefail
python=${1:-python3}
logs=${LOGS:-build/gpu/logs}
limit=${GPU_CHECK_S:-540}
summary=()
failed=0
mkdir -p "$logs"

# step NAME SECONDS COMMAND...: runs the command with its output in a file; if it fails, shows the
# last lines.
step() {
  local name=$1 most=$2 begin=$SECONDS left=$((limit - SECONDS)) status=0
  shift 2
  if [ "$left" -lt 10 ]; then
    summary+=("NOT RUN  $name: no time was left")
    failed=1
    return 1
  fi
  timeout --kill-after=5 "$((most < left ? most : left))" "$@" >"$logs/$name.txt" 2>&1 || status=$?
  local took=$((SECONDS - begin)) last
  last=$(grep -v '^ *$' "$logs/$name.txt" | tail -n 1 | cut -c -100)
  case $status in
    0) summary+=("ok       $name (${took} s) $last") ;;
    124 | 137) summary+=("TIME     $name: not done after ${took} s") ;;
    *) summary+=("FAILED   $name (${took} s, status $status) $last") ;;
  esac
  echo "${summary[-1]}"
  [ "$status" = 0 ] && return 0
  failed=1
  grep -E '^E  |^(FAILED|ERROR) |error|Error' "$logs/$name.txt" | cut -c -300 | head -n 15
  tail -n 8 "$logs/$name.txt" | cut -c -300
  return 1
}

# Checks that all needed packages and tools are installed, since the script downloads nothing.
needs() {
  "$python" - <<'EOF'
import importlib.util as util, os, shutil, sys, sysconfig
modules = "numpy click rich pybind11 pytest pytest_timeout hypothesis ml_dtypes".split()
missing = [one for one in modules if util.find_spec(one) is None]
if missing:
    print("missing for", sys.executable + ":", *missing, "(pip install, with - for _)")
tools = [one for one in ("cmake", "nvcc") if shutil.which(one) is None]
if tools == ["nvcc"] and (os.path.exists("/usr/local/cuda/bin/nvcc") or "CUDA_HOME" in os.environ):
    tools = []
if not (shutil.which("c++") or shutil.which("g++")):
    tools.append("a C++20 compiler")
if not os.path.exists(os.path.join(sysconfig.get_paths()["include"], "Python.h")):
    tools.append("Python.h (python3-dev)")
if tools:
    print("missing:", *tools)
here = [one for one in ("cupy", "torch", "numba", "jax") if util.find_spec(one)]
print("array libraries:", *(here or ["none, so that those are not tested"]))
sys.exit(bool(missing or tools))
EOF
}

# Puts the extension next to the package's sources, where only this run's Python finds it.
build() {
  if [ -n "${EXTENSION:-}" ]; then
    trap 'rm -f "pycoll/$(basename "$EXTENSION")"' EXIT
    cp "$EXTENSION" pycoll/
    return
  fi
  local generator=()
  command -v ninja >/dev/null && generator=(-G Ninja)
  suffix=$("$python" -c 'import sysconfig; print(sysconfig.get_config_var("EXT_SUFFIX"))')
  step configure 60 cmake -S . -B build/gpu/cmake "${generator[@]}" -DCMAKE_BUILD_TYPE=Release \
    -DPYCOLL_CUDA=ON -DPython_EXECUTABLE="$(command -v "$python")" \
    -Dpybind11_DIR="$("$python" -m pybind11 --cmakedir)" || return 1
  step build 300 cmake --build build/gpu/cmake --target _core --parallel "$(nproc)" || return 1
  trap 'rm -f "pycoll/_core$suffix"' EXIT
  cp "build/gpu/cmake/bindings/_core$suffix" pycoll/
}

tests() { step "$1" "$2" "$python" -m pytest -q -ra --tb=short -p no:cacheprovider \
  -o timeout="$3" -o faulthandler_timeout="$3" "${@:4}"; }

end() {
  local commit
  commit=$(git log -1 --format='commit %h' 2>/dev/null || echo "no commit known")
  echo "# gpu-check: $commit, $device"
  printf '%s\n' "${summary[@]}"
  cat "$logs/bench.txt" "$logs/processes.txt" 2>/dev/null
  exit "$failed"
}

device="no device found yet"
needs || exit 1
# Ranks that are threads of one process wait for each other. So no two streams may share a hardware
# queue, and no kernel may be loaded while others run.
export CUDA_DEVICE_MAX_CONNECTIONS=32 CUDA_MODULE_LOADING=EAGER
# JAX would take most of the memory for itself.
export XLA_PYTHON_CLIENT_PREALLOCATE=false
# Operations that wait for a rank that never comes fail soon.
export TEST_TIMEOUT_S=10 PYTHONPATH=$PWD:tests:tests/gpu PYTHONDONTWRITEBYTECODE=1
build || end
device=$("$python" -c 'from pycoll import _core; print(_core.device_summary())' 2>&1 | tail -n 1)
echo "$device"
if ! "$python" -c 'import sys; from test_gpu import has_gpu
sys.exit(not has_gpu(sys.argv[1]))' "$device"; then
  echo "gpu-check: there is no GPU here, so nothing was checked" >&2
  exit 1
fi

step first 60 "$python" tests/gpu/first.py
tests on_device 60 30 tests/gpu/on_device.py
# The benchmarks run before tests that may take long when they fail, so that there is time for them.
step bench 120 "$python" -u bench/gpu.py --json "$logs/bench.json"
step processes 40 "$python" -u -m pycoll bench all_reduce --device cuda -n 2 -b 8 -e 4M -f 64 \
  --samples 11
for module in on_failures on_messages on_first_messages on_staged_messages on_layouts on_jax \
  on_hosts on_registered on_codes; do
  tests "$module" 60 30 "tests/gpu/$module.py"
done
for library in cupy torch numba jax; do
  tests "$library" 45 40 tests/gpu/on_frameworks.py -k "test_$library"
done
# Last, since under it ranks may be too slow for their deadlines, or unable to run concurrently.
if command -v compute-sanitizer >/dev/null; then
  for tool in memcheck racecheck; do
    step "$tool" 50 compute-sanitizer --tool "$tool" --error-exitcode 1 --target-processes all \
      "$python" tests/gpu/first.py
  done
else
  summary+=("NOT RUN  compute-sanitizer: it is not in PATH")
fi
end
