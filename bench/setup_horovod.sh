#!/usr/bin/env bash
# Builds Horovod's last release for the torch of the comparison, into .peers/horovod; takes some
# minutes. The script changes only the C++ standard to C++17, which torch's headers require.
set -euo pipefail
python=${PYTHON:-python3}
version=0.28.1

[ -x .peers/horovod/bin/python ] || "$python" -m venv .peers/horovod
pip=.peers/horovod/bin/pip
"$pip" install --quiet numpy torch==2.13.0 cloudpickle psutil pyyaml packaging setuptools wheel
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$pip" download --quiet --no-deps --no-build-isolation --no-binary :all: --dest "$folder" \
  "horovod==$version"
tar -xzf "$folder/horovod-$version.tar.gz" -C "$folder"
sources=$folder/horovod-$version
sed -i 's/set(CMAKE_CXX_STANDARD 14)/set(CMAKE_CXX_STANDARD 17)/' \
  "$sources/CMakeLists.txt" "$sources/horovod/torch/CMakeLists.txt"
sed -i 's/-std=c++11/-std=c++17/' "$sources/third_party/gloo/CMakeLists.txt"
export HOROVOD_WITH_PYTORCH=1 HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_MXNET=1
export HOROVOD_WITH_GLOO=1 HOROVOD_WITHOUT_MPI=1 HOROVOD_CPU_OPERATIONS=GLOO
# Current CMake has dropped the policy version that Horovod's files request.
export CMAKE_POLICY_VERSION_MINIMUM=3.5
"$pip" install --quiet --no-build-isolation --no-deps "$sources"
