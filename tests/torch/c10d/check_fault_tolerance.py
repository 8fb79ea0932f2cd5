"""torch's own tests of reconfigure() over the backend "pycoll", from torch 2.14 on.

    python tests/torch/c10d/check_fault_tolerance.py FILE [NAME ...]

FILE is test/distributed/test_c10d_fault_tolerance.py of torch's sources. The wheel lacks it, and
has what it imports, except for the package expecttest. The file lists backends, and this program
puts pycoll in their place. A NAME chooses the tests that contain it. Ends with status 1 where a
test fails.
"""

from __future__ import annotations

import importlib
import multiprocessing
import sys
import unittest
from pathlib import Path
from typing import Any

import pycoll.torch  # noqa: F401  # registers the backend

_LIST, _MAKE = "FAULT_TOLERANCE_BACKENDS", "_make_fault_tolerance_test_class"


def _cases(path: Path) -> Any:
    """torch's tests as a class for pycoll, whose ranks are forked: an import of torch in each of
    them would take most of the time."""
    sys.path.insert(0, str(path.parent))
    module = importlib.import_module(path.stem)
    if not hasattr(module, _LIST) or not hasattr(module, _MAKE):
        raise SystemExit(f"{path} has no {_LIST} and {_MAKE}: expected torch's own file")
    made: Any = getattr(module, _MAKE)("pycoll", "cpu")

    class Forked(made):  # type: ignore[misc]  # a class that exists only now
        def _spawn_processes(self) -> None:
            self._start_processes(multiprocessing.get_context("fork").Process)

    return Forked


def main() -> int:
    """Run the tests; return the exit status."""
    every = unittest.defaultTestLoader.loadTestsFromTestCase(_cases(Path(sys.argv[1]).resolve()))
    tests: list[Any] = list(every)
    names = sys.argv[2:]
    chosen = [one for one in tests if not names or any(name in one.id() for name in names)]
    result = unittest.TextTestRunner(verbosity=2).run(unittest.TestSuite(chosen))
    return 0 if result.wasSuccessful() and chosen else 1


if __name__ == "__main__":
    sys.exit(main())
