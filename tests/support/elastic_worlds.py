"""The worlds of a job of elastic_rank.py, as its ranks have noted them in a folder."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path

RANK = Path(__file__).with_name("elastic_rank").with_suffix(".py")


class Worlds:
    """What the ranks do, and the worlds that they have been in. The folder is theirs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tell("")
        (folder / "said").touch()

    @property
    def command(self) -> list[str]:
        """The command line of a rank."""
        return [str(RANK), str(self.folder)]

    def write(self, name: str, text: str) -> None:
        """Replace a file at once, so that nobody reads half of it."""
        fresh = self.folder / "fresh"
        fresh.write_text(text)
        fresh.rename(self.folder / name)

    def tell(self, text: str) -> None:
        """What the ranks do at their next step; see elastic_rank.py."""
        self.write("do", text)

    def all(self) -> list[list[int]]:
        """The processes of every whole world, by rank, in order."""
        found: list[list[int]] = []
        seen: dict[int, int] = {}
        for line in (self.folder / "said").read_text().splitlines():
            pid, rank, size = (int(word) for word in re.findall(r"\d+", line))
            seen[rank] = pid
            if len(seen) == size:
                found.append([seen[one] for one in range(size)])
                seen = {}
        return found

    def wait(
        self, done: Callable[[list[list[int]]], bool], check: Callable[[], object], limit_s: float
    ) -> list[list[int]]:
        """The worlds, once ``done`` says that they are enough; ``check`` raises before."""
        until = time.monotonic() + limit_s
        while not done(self.all()):
            check()
            assert time.monotonic() < until, (self.folder / "said").read_text()
            time.sleep(0.02)
        return self.all()
