"""Doors to features that use internals of torch.

Each such feature has one door, in the module that holds all names it uses. The first caller runs
the self-test of the door. If the test fails, the feature is off for the life of the process, with
one warning, and the program goes on without it. docs/process-wide.md lists the doors.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable

import torch

#: The versions of torch with which all tests of the features have run.
TESTED = ("2.13.0", "2.14.1")


class Door:
    """The self-test of one feature, and whether the feature is on.

    ``feature``: its name. ``test``: raises if this version of torch does not behave as the feature
    needs. ``without``: how the program goes on, for the warning. ``tested``: versions of torch.
    Threads: any.
    """

    def __init__(
        self,
        feature: str,
        test: Callable[[], None],
        without: str,
        tested: tuple[str, ...] = TESTED,
    ) -> None:
        self.feature, self.without, self.tested = feature, without, tested
        self._test = test
        self._lock = threading.Lock()
        self._open: bool | None = None

    def is_open(self) -> bool:
        """Whether the feature works with this torch. The first call tests it, and may warn."""
        if self._open is None:
            with self._lock:
                if self._open is None:
                    self._open = self._passes()
        return self._open

    def _passes(self) -> bool:
        try:
            self._test()
        except Exception as error:
            warnings.warn(
                f"{self.feature} are off, since their self-test fails with torch "
                f"{torch.__version__} ({type(error).__name__}: {error}); tested versions: "
                f"{', '.join(self.tested)}. {self.without}",
                RuntimeWarning,
                stacklevel=4,
            )
            return False
        return True


def expect(holds: bool, what: str) -> None:
    """Raise RuntimeError with ``what`` unless ``holds``; for self-tests."""
    if not holds:
        raise RuntimeError(what)
