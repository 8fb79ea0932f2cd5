"""Device arrays on a real GPU; skipped, aloud, where there is none.

The tests are those of on_device.py, which test_fake.py runs over another driver, and what each
framework at hand makes of its own arrays and streams (on_frameworks.py).
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from device_modules import ON_GPUS

from pycoll import _core

ROOT = Path(__file__).resolve().parents[2]


def has_gpu(summary: str) -> bool:
    """Whether the driver sees a device, as ``pycoll info`` tells it."""
    found = re.search(r"driver \S+, (\d+) device", summary)
    return found is not None and int(found.group(1)) > 0


def test_summaries_are_understood() -> None:
    assert has_gpu("kernels for sm_90; driver 13.0, 2 devices: 0 A (sm_90), 1 B (sm_90)")
    assert not has_gpu("kernels for sm_90; driver 13.0, 0 devices")
    assert not has_gpu("kernels for sm_90; libcuda.so.1 cannot be opened (no such file)")


@pytest.mark.parametrize("module", ON_GPUS)
def test_device_arrays_on_this_gpu(module: str) -> None:
    summary = _core.device_summary()
    if not has_gpu(summary):
        pytest.skip(f"NO GPU HERE, so nothing has run on one: {summary}")
    paths = [str(ROOT / "tests/support"), str(Path(__file__).parent)]
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-ra",
            str(Path(__file__).with_name(f"{module}.py")),
        ],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=290,
        check=False,
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
