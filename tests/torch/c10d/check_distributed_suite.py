"""torch's own DistributedTest over the backend "pycoll", and how many of its tests passed.

    python tests/torch/c10d/check_distributed_suite.py [-n RANKS] [--backend gloo] [NAME ...]
    python tests/torch/c10d/check_distributed_suite.py --for-gloo    # tests that ask for Gloo, too

The tests come with torch (torch.testing._internal), which needs the package expecttest for them. A
NAME chooses the tests that contain it. Ranks are forked, since an import of torch in each would
take most of the time. Ends with status 1 where a test fails.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
import unittest
from typing import Any


def _cases(backend: str) -> Any:
    """torch's tests as a class whose ranks are forked."""
    import torch

    torch.set_num_threads(1)
    from torch.testing._internal import common_distributed

    import pycoll.torch  # noqa: F401  # registers the backend

    for feature in ("ddp", "subgroup"):
        common_distributed.DistTestCases.backend_feature[feature].add(backend)

    # Its decorators ask for the features when it is imported.
    from torch.testing._internal.distributed import distributed_test

    class Forked(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
        def setUp(self) -> None:
            super().setUp()
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

    return Forked


class _Told(unittest.TextTestResult):
    """Tells each outcome at once, and keeps the names by outcome."""

    def __init__(self, *args: Any, **words: Any) -> None:
        super().__init__(*args, **words)
        self.found: dict[str, list[str]] = {}

    def _tell(self, outcome: str, test: Any, note: str = "") -> None:
        name = test.id().rpartition(".")[2]
        self.found.setdefault(outcome, []).append(name)
        print(f"{outcome} {name} {note}".rstrip(), flush=True)

    def addSuccess(self, test: Any) -> None:  # noqa: N802  # unittest's name
        self._tell("passed", test)

    def addSkip(self, test: Any, reason: str) -> None:  # noqa: N802  # as above
        self._tell("skipped", test, reason)

    def addFailure(self, test: Any, err: Any) -> None:  # noqa: N802  # as above
        super().addFailure(test, err)
        self._tell("failed", test, str(err[1]))

    addError = addFailure  # noqa: N815  # as above


def _give_pycoll_for_gloo() -> None:
    """Tests that ask for a group of the backend "gloo" get one of pycoll."""
    import torch.distributed as dist

    make, make_group = dist.init_process_group, dist.new_group

    def init_process_group(backend: Any = None, *args: Any, **words: Any) -> Any:
        return make("pycoll" if backend == "gloo" else backend, *args, **words)

    def new_group(*args: Any, backend: Any = None, **words: Any) -> Any:
        return make_group(*args, backend="pycoll" if backend == "gloo" else backend, **words)

    dist.init_process_group, dist.new_group = init_process_group, new_group


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("-n", type=int, default=3, help="how many ranks")
    parser.add_argument("--backend", default="pycoll")
    parser.add_argument("--for-gloo", action="store_true", help="pycoll, where tests ask for Gloo")
    parser.add_argument("names", nargs="*", help="only tests whose names contain one of these")
    given = parser.parse_args()
    if given.for_gloo:
        given.backend = "gloo"
        _give_pycoll_for_gloo()
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {
            "BACKEND": given.backend,
            "WORLD_SIZE": str(given.n),
            "TEMP_DIR": folder,
            "MASTER_ADDR": "127.0.0.1",
        }
        tests = unittest.defaultTestLoader.loadTestsFromTestCase(_cases(given.backend))
        every: list[Any] = list(tests)
        chosen = [
            one for one in every if not given.names or any(n in one.id() for n in given.names)
        ]
        begin_s = time.monotonic()
        result: Any = unittest.TextTestRunner(resultclass=_Told, verbosity=0).run(
            unittest.TestSuite(chosen)
        )
    counts = ", ".join(f"{len(names)} {outcome}" for outcome, names in sorted(result.found.items()))
    name = "pycoll for gloo" if given.for_gloo else given.backend
    print(f"{name}, {given.n} ranks: {counts} in {time.monotonic() - begin_s:.0f} s")
    return 1 if result.found.get("failed") else 0


if __name__ == "__main__":
    sys.exit(main())
