"""The least time of an all_reduce of two ranks on this machine.

Builds bare_exchange.cpp and takes samples from it, interleaved with those of the libraries.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).with_suffix(".cpp")
_FLAGS = ("-std=c++20", "-O3", "-march=native")


def built(folder: str) -> Path | None:
    """Build the program in ``folder``; None, with a message on stderr, if it cannot be built."""
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("clang++")
    if compiler is None:
        print("# no C++ compiler, so nothing is known of a bare exchange", file=sys.stderr)
        return None
    program = Path(folder) / SOURCE.stem
    made = subprocess.run(
        [compiler, *_FLAGS, "-o", str(program), str(SOURCE)],
        capture_output=True,
        text=True,
        check=False,
    )
    if made.returncode == 0:
        return program
    print(f"# {SOURCE.name} cannot be built here, left out:\n{made.stderr}", file=sys.stderr)
    return None


class BareExchange:
    """Samples of one size, in seconds. Of both kinds of stores the faster one counts."""

    def __init__(self, program: Path, nbytes: int) -> None:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._process = subprocess.Popen([str(program), str(nbytes)], text=True, **pipes)
        self.samples: list[float] = []

    def sample(self) -> None:
        """Add one sample. Raises OSError if the program has failed."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        words = self._process.stdout.readline().split()
        if len(words) != 4:
            raise OSError(f"{SOURCE.stem} ended with status {self._process.wait()}")
        self.samples.append(min(float(words[1]), float(words[3])) * 1e-6)

    @property
    def median(self) -> float:
        """Return the median in seconds."""
        return statistics.median(self.samples)

    def close(self) -> None:
        """End the program."""
        self._process.communicate()
