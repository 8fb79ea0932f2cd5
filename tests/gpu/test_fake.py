"""Device arrays on the driver of tests/cpp/device, which needs no GPU; each module in a process.

The driver is found by its name, libcuda.so.1, in place of NVIDIA's; it is built here if need be.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from device_modules import ANYWHERE, ON_CARDS, ON_FAKES

from pycoll import _core

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "python"


@pytest.fixture(scope="module")
def environ() -> dict[str, str]:
    """What makes a process find the driver of the tests."""
    if "not part of this build" in _core.device_summary():
        pytest.skip(
            "THIS BUILD HAS NO CUDA KERNELS, so no device array is tested: build with nvcc in PATH"
        )
    if not re.search(r"PYCOLL_TESTS:\w+=ON", (BUILD / "CMakeCache.txt").read_text()):
        configure = ["cmake", "-DPYCOLL_TESTS=ON", str(BUILD)]
        subprocess.run(configure, check=True, capture_output=True, timeout=200)
    build("cuda_fake")
    folder = BUILD / "tests" / "cpp" / "device" / "fake"
    assert (folder / "libcuda.so.1").exists()
    paths = [str(folder), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
    return {
        **os.environ,
        "LD_LIBRARY_PATH": os.pathsep.join(paths),
        "PYCOLL_DEVICE_MEMORY_MIB": "2",
        # Channels of all worlds of a module, which are kept until the process ends.
        "FAKE_CUDA_MEMORY": str(2 << 30),
        "PYTHONPATH": os.pathsep.join([str(ROOT / "tests/support"), str(Path(__file__).parent)]),
    }


def build(target: str) -> None:
    subprocess.run(
        ["cmake", "--build", str(BUILD), "--target", target],
        check=True,
        capture_output=True,
        timeout=280,
    )


def output_of(environ: dict[str, str], *words: str, timeout: float) -> str:
    done = subprocess.run(
        [sys.executable, *words],
        cwd=ROOT,
        env=environ,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    return done.stdout


@pytest.mark.parametrize("module", ON_FAKES)
def test_device_arrays_on_the_fake_driver(environ: dict[str, str], module: str) -> None:
    """Each in a process of its own, whose device has little memory."""
    test = str(Path(__file__).with_name(f"{module}.py"))
    output_of(environ, "-m", "pytest", "-q", "-p", "no:cacheprovider", test, timeout=290)


def test_device_memory_on_a_network(environ: dict[str, str]) -> None:
    """The public interface where network cards reach devices, over the tests' own of both."""
    if "not part of this build" in _core.verbs_missing():
        pytest.skip(
            "THIS BUILD HAS NO VERBS, so GPUDirect RDMA is not tested: apt install libibverbs-dev"
        )
    build("verbs_fake_library")
    paths = [str(BUILD / "tests" / "cpp" / "fake"), environ["LD_LIBRARY_PATH"]]
    test = str(Path(__file__).with_name(f"{ON_CARDS}.py"))
    words = ["-m", "pytest", "-q", "-p", "no:cacheprovider", test]
    both = {**environ, "LD_LIBRARY_PATH": os.pathsep.join(paths)}
    output_of(both, *words, timeout=290)


WARNED = """
import warnings
import numpy as np, pycoll
from pycoll.tools.bench.cuda import Stream, array
from concurrent.futures import ThreadPoolExecutor
def run(comm):
    with Stream(comm.rank):
        return float(comm.all_reduce(array(np.full(300, comm.rank + 1.0))).get().sum())
comms = pycoll.local_world(2)
with warnings.catch_warnings(record=True) as caught, ThreadPoolExecutor(2) as pool:
    warnings.simplefilter("always")
    assert list(pool.map(run, comms)) == [900.0, 900.0]
for line in caught:
    print(line.message)
for comm in comms:
    comm.close()
"""


def test_devices_out_of_reach(environ: dict[str, str]) -> None:
    """Where the machine joins no two devices nothing is said; where it lies, one line."""
    assert output_of({**environ, "FAKE_CUDA_PEERS": "0"}, "-c", WARNED, timeout=60) == ""
    lines = output_of({**environ, "FAKE_CUDA_CORRUPT": "1"}, "-c", WARNED, timeout=60).splitlines()
    assert len(lines) == 1
    assert "do not read what the other one writes" in lines[0]
    assert "most likely an IOMMU or ACS redirects it" in lines[0]


OLD = """
import numpy as np, pycoll
from pycoll.tools.bench.cuda import Stream, array
from pycoll.tools.info import facts
print(dict(facts())["device cuda"])
(comm,) = pycoll.local_world(1)
with Stream():
    try:
        comm.all_reduce(array(np.ones(3)))
    except pycoll.PycollError as error:
        print(error)
"""


def test_a_driver_that_is_too_old(environ: dict[str, str]) -> None:
    """It is told what was built, what is there, and what to do."""
    told = output_of({**environ, "FAKE_CUDA_VERSION": "12040"}, "-c", OLD, timeout=60).splitlines()
    assert told[0].startswith("kernels for sm_80, sm_90, sm_100, PTX; driver 12.4, 2 devices: ")
    assert told[1:] == [
        "the NVIDIA driver knows CUDA 12.4, pycoll's kernels need 13.0: update the driver"
    ]


def test_what_a_gpu_is_checked_by_is_all_there_is() -> None:
    """Each module has its line in what `make gpu-check` runs."""
    script = Path(__file__).with_name("run.sh").read_text()
    assert [name for name in ANYWHERE if not re.search(rf"\b{name}\b", script)] == []


def test_what_tells_where_a_gpu_fails_first(environ: dict[str, str]) -> None:
    """Each of its steps is told, from one rank to four."""
    text = output_of(environ, "tests/gpu/first.py", "--count-max", "3000", timeout=60)
    assert len(text.splitlines()) == 23
    assert all(line.startswith("ok ") for line in text.splitlines())


def test_the_benchmarks_run_on_the_fake_driver(environ: dict[str, str]) -> None:
    """Their results are right; their times mean nothing there."""
    sizes = ["-b", "8", "-e", "64", "-f", "8"]
    words = ["bench", "all_reduce", "-n", "2", *sizes, "--samples", "5", "--graph"]
    text = output_of(environ, "-m", "pycoll", *words, "--device", "cuda", timeout=120)
    assert "over cuda" in text
    assert "of the limit" in text
    assert "wrong elements        : 0 OK" in text
    words = ["--ranks", "2", "--sizes", "64", "--protocol", "pattern"]
    text = output_of(environ, "bench/gpu.py", *words, timeout=120)
    assert "2 threads" in text
    assert "in pattern" in text
    assert "copy from 0 to 1" in text
    assert len(text.splitlines()) == 4
    words = ["--ranks", "2", "--sizes", "640", "--codec", "int8", "--arrays", "3"]
    text = output_of(environ, "bench/gpu.py", *words, timeout=120)
    assert "with int8" in text
    assert "lists of 3 arrays" in text
    assert [line.split()[-1] for line in text.splitlines()[2:]] == ["0", "0"]
