"""Device arrays on the driver of tests/device, which needs no GPU: on_device.py in a fresh process.

The driver is found by its name, libcuda.so.1, in place of NVIDIA's; it is built here if need be.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pycoll import _core

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "python"
MODULE = "on_device"
TESTS = Path(__file__).with_name(f"{MODULE}.py")


@pytest.fixture(scope="module")
def environ() -> dict[str, str]:
    """What makes a process find the driver of the tests."""
    if "not part of this build" in _core.device_summary():
        pytest.skip("THIS BUILD HAS NO CUDA KERNELS: nothing of device arrays is tested")
    subprocess.run(
        ["cmake", "-DPYCOLL_TESTS=ON", str(BUILD)], check=True, capture_output=True, timeout=200
    )
    subprocess.run(
        ["cmake", "--build", str(BUILD), "--target", "cuda_fake"],
        check=True,
        capture_output=True,
        timeout=280,
    )
    folder = BUILD / "tests" / "device" / "fake"
    assert (folder / "libcuda.so.1").exists()
    paths = [str(folder), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
    return {
        **os.environ,
        "LD_LIBRARY_PATH": os.pathsep.join(paths),
        "PYCOLL_DEVICE_MEMORY_MIB": "2",
        "PYTHONPATH": os.pathsep.join([str(ROOT / "tests"), str(Path(__file__).parent)]),
    }


def test_device_arrays_on_the_fake_driver(environ: dict[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(TESTS)],
        cwd=ROOT,
        env=environ,
        capture_output=True,
        text=True,
        timeout=290,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
