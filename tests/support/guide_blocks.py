"""Console blocks of guides: runs their commands, and compares the output with the block.

A block shows a terminal: lines that begin with ``$`` are commands, all others are output. A block
is run as one script of a shell. Its output has to be the block's, but for the order of lines and
for numbers that no two runs share. A line of output that is indented continues the line before
it, and a line ``...`` stands for any number of lines.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
GUIDES = ROOT / "docs" / "guides"
#: The secret of all jobs, as a user would have exported it.
SECRET = "a secret of the tests"
#: Commands of guides that this Python runs itself.
MODULES = {
    "python": (),
    "pycoll": ("-m", "pycoll"),
    "torchrun": ("-m", "torch.distributed.run"),
    "ray": ("-m", "ray.scripts.scripts"),
    "dask": ("-m", "dask"),
}
#: Numbers of processes, jobs, ports and times, which differ from run to run.
NUMBERS = (
    (r"\(pid \d+\)", "(pid N)"),
    (r"\((host\d):\d+\)", r"(\1:N)"),
    (r"\b(batch job |slurm-)\d+", r"\1N"),
)


@dataclass(frozen=True)
class Scene:
    """Blocks of a guide that are typed at the same time, one on each host.

    ``place`` names the hosts: "here" is this machine; the tests that run the scene define the
    others. ``files`` are programs next to the commands. ``replaced`` are words of the page that
    differ in a test, in commands and output. ``errors`` is False where another program writes lines
    of its own to stderr. ``together``: the hosts get numbers as they come, so the lines of all
    blocks are compared at once. ``others`` are commands of the next hosts, whose output and status
    do not matter. ``environment`` are variables of the commands. ``is_open``: programs print lines
    that the guide leaves out. ``first`` is the host of the first block.
    """

    page: str
    blocks: tuple[int, ...]
    place: str
    files: Mapping[str, str] = field(default_factory=dict)
    status: int = 0
    replaced: Mapping[str, str] = field(default_factory=dict)
    errors: bool = True
    together: bool = False
    others: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    is_open: bool = False
    first: int = 0

    def __str__(self) -> str:
        return f"{self.page}-{'-'.join(map(str, self.blocks))}"


def fenced(page: str, language: str) -> list[str]:
    """The blocks of a guide in a language, in their order."""
    text = next(GUIDES.rglob(f"{page}.md")).read_text()
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.S | re.M)


def typed(block: str) -> tuple[str, list[str]]:
    """The commands of a block as a script, and the lines that it shows."""
    commands: list[str] = []
    shown: list[str] = []
    continues = False
    for line in block.splitlines():
        is_typed = continues or line.startswith("$ ")
        if is_typed:
            commands.append(line.removeprefix("$ "))
        else:
            shown.append(line)
        continues = is_typed and line.endswith("\\")
    return "\n".join(commands), whole(shown)


def whole(lines: Sequence[str]) -> list[str]:
    """Lines whose indented continuations are joined to them."""
    found: list[str] = []
    for line in lines:
        if line.startswith("  ") and found:
            found[-1] += f" {line.strip()}"
        else:
            found.append(line.rstrip())
    return found


def plain(line: str) -> str:
    """A line without the numbers that differ from run to run."""
    for pattern, name in NUMBERS:
        line = re.sub(pattern, name, line)
    return line


def differences(shown: Sequence[str], printed: Sequence[str]) -> list[str]:
    """How printed lines differ from the shown ones; no entry if they are alike."""
    wanted = Counter(plain(line) for line in shown)
    found = Counter(plain(line.rstrip()) for line in printed if line.strip())
    is_open = wanted.pop("...", 0) > 0
    missing = [f"not printed: {line}" for line in (wanted - found).elements()]
    more = [] if is_open else [f"not shown: {line}" for line in (found - wanted).elements()]
    return missing + more


def environment(folder: Path, bins: Sequence[Path] = (), **more: str) -> dict[str, str]:
    """The environment of a user who has the commands of MODULES, written to ``folder``, and those
    of ``bins``."""
    commands = folder / "commands"
    commands.mkdir(exist_ok=True)
    for name, words in MODULES.items():
        path = commands / name
        path.write_text(f'#!/bin/sh\nexec {" ".join((sys.executable, *words))} "$@"\n')
        path.chmod(0o755)
    kept = {
        name: text
        for name, text in os.environ.items()
        if not name.startswith("PYCOLL_") and "proxy" not in name.lower()
    }
    own = {
        "PATH": os.pathsep.join([*map(str, bins), str(commands), kept["PATH"]]),
        "COLUMNS": "500",
        "OMP_NUM_THREADS": "1",
        "PYCOLL_SECRET": SECRET,
        "SECRET": SECRET,
    }
    return {**kept, **own, **more}


def texts_of(scene: Scene) -> list[str]:
    """The blocks of a scene, with the words of the test in them."""
    blocks = fenced(scene.page, "console")
    texts = [blocks[number] for number in scene.blocks]
    for old, new in scene.replaced.items():
        assert any(old in text for text in texts), f"{scene}: the guide has no {old}"
        texts = [text.replace(old, new) for text in texts]
    return texts


def lines_of(text: str) -> list[str]:
    """The lines of an output. Where ranks share a pipe, the end of a line may come behind the next
    line."""
    parted = re.sub(r"(?<=\d)(?=rank \d)", "\n", text)
    lines = parted.splitlines()
    for _ in range(parted.count("\n") - text.count("\n")):
        lines.remove("")
    return lines


Place = Callable[[int, Sequence[str]], Sequence[str]]


def play(
    scene: Scene,
    folder: Path,
    on: Place = lambda _, line: line,
    bins: Sequence[Path] = (),
    limit_s: float = 120,
    **more: str,
) -> None:
    """Run the blocks of a scene in ``folder``; their output and status must be those shown.

    ``on`` gives the command line that runs a command line on a host. ``bins`` are folders of
    commands in addition to those of this Python."""
    if not (folder / "examples").exists():
        (folder / "examples").symlink_to(ROOT / "examples")
    for name, text in scene.files.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    scripts = [typed(text) for text in texts_of(scene)]
    running = []
    for host, script in enumerate([*(script for script, _ in scripts), *scene.others]):
        running.append(
            subprocess.Popen(
                on(scene.first + host, ["sh", "-c", script]),
                cwd=folder,
                env=environment(folder, bins, **scene.environment, **more),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    try:
        ended = [process.communicate(timeout=limit_s) for process in running]
    finally:
        for process in running:
            process.kill()
            process.wait()
    ended = ended[: len(scripts)]
    statuses = [process.returncode for process in running[: len(scripts)]]
    assert statuses == [scene.status] * len(scripts), ended
    printed = [lines_of(out + err if scene.errors else out) for out, err in ended]
    shown = [lines for _, lines in scripts]
    if scene.together:
        shown, printed = [[*chain(*shown)]], [[*chain(*printed)]]
    for wanted, found in zip(shown, printed, strict=True):
        omitted = ["..."] if scene.is_open else []
        assert differences([*wanted, *omitted], found) == [], ended
