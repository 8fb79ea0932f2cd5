"""The time of Horovod itself for sets of gradients, tensor by tensor: part of training_calls.py.

Horovod's last release must be built for a current torch: bench/setup_horovod.sh does that, into its
own environment. Without it, training_calls.py compares with recorded rates.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jobs import Start, binaries_of

_LONGEST_S = 300


def is_installed() -> bool:
    """Return whether Horovod is installed."""
    return (binaries_of("horovod") / "horovodrun").exists()


def started_by(ranks: int, script: str, words: Sequence[str]) -> Start:
    """Return the command that starts ``ranks`` ranks of a Python program with Horovod's Python."""
    binaries = binaries_of("horovod")
    line = [str(binaries / "horovodrun"), "--gloo", "-np", str(ranks), str(binaries / "python")]
    environment = {"PATH": f"{binaries}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    return Start([*line, script, *words], environment)


def reduce_singly(hvd: Any, tensors: Sequence[Any], prefix: str = "") -> None:
    """Reduce each tensor under its own name through Horovod's interface; then wait for all."""
    handles = [
        hvd.allreduce_async_(one, name=f"{prefix}{number}", op=hvd.Sum)
        for number, one in enumerate(tensors)
    ]
    for handle in handles:
        hvd.synchronize(handle)


def seconds_of(sets: Sequence[str], rounds: int) -> dict[str, float]:
    """Return the median over rounds of the slower rank's seconds, by set; {} if Horovod cannot
    run."""
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder, "found")
        start = started_by(2, str(Path(__file__).resolve()), [str(found), str(rounds), *sets])
        ran = subprocess.run(
            start.line,
            env={**os.environ, **start.environment},
            capture_output=True,
            text=True,
            check=False,
            timeout=_LONGEST_S,
        )
        if ran.returncode != 0:
            print(f"# Horovod could not be run, left out:\n{ran.stderr[-2000:]}", file=sys.stderr)
            return {}
        times: dict[str, float] = json.loads(found.read_text())
        return times


def main() -> None:
    """Run on one rank, which horovodrun has started."""
    import horovod.torch as hvd
    import torch
    import training_models

    path, rounds, *sets = sys.argv[1:]
    torch.set_num_threads(1)
    hvd.init()
    times = {}
    for name in sets:
        model = training_models.made(name, 0).model
        tensors = [torch.zeros(p.shape) for p in model.parameters()][::-1]
        took = []
        for _ in range(int(rounds) + 2):
            hvd.barrier()
            begin = time.perf_counter()
            reduce_singly(hvd, tensors, f"{name} ")
            took.append(time.perf_counter() - begin)
        mine = torch.tensor([statistics.median(took[2:])], dtype=torch.float64)
        times[name] = hvd.allreduce(mine, op=hvd.Max).item()
    if hvd.rank() == 0:
        Path(path).write_text(json.dumps(times))
    hvd.shutdown()


if __name__ == "__main__":
    main()
