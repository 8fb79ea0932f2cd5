"""Two hosts for tests: network namespaces joined by a cable, which needs root and iproute2."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

_made = itertools.count()


def ip(*words: str) -> None:
    """Run the command ip."""
    subprocess.run(["ip", *words], check=True, capture_output=True)


@contextmanager
def two_namespaces(network: str) -> Iterator[list[str]]:
    """Give the names of two namespaces. ``network`` begins their addresses, ``network.1`` and
    ``network.2``, on an interface "cable". Skips the test where none can be made."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("needs root and the command ip (apt: iproute2) for network namespaces")
    names = [f"pycoll{os.getpid()}{side}{next(_made)}" for side in "ab"]
    try:
        try:
            for name in names:
                ip("netns", "add", name)
        except subprocess.CalledProcessError as error:
            pytest.skip(
                f"needs the right to make network namespaces: {error.stderr.decode().strip()}"
            )
        ip("link", "add", "cable", "netns", names[0], "type", "veth", "peer", "name", "cable",
           "netns", names[1])  # fmt: skip
        for number, name in enumerate(names, 1):
            ip("-n", name, "addr", "add", f"{network}.{number}/24", "dev", "cable")
            for device in ("lo", "cable"):
                ip("-n", name, "link", "set", device, "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
