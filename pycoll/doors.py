"""Doors to features that reach into other libraries.

Each such feature has one door, in the module that holds all names it uses. The first caller runs
the self-test of the door. If the library is older than the oldest tested version, or if the test
fails, the feature is off for the life of the process, with one warning, and the program goes on
without it. A newer version that was not tested runs the feature if the self-test passes.
docs/process-wide.md lists the doors.
"""

from __future__ import annotations

import re
import sys
import threading
import warnings
from collections.abc import Callable

from pycoll.config import is_on

#: The versions of torch with which all tests of the features have run, the oldest first.
TORCH_TESTED = ("2.13.0", "2.14.1")


class Door:
    """The switch and the self-test of one feature, and whether the feature is on.

    ``feature``: its name, a plural. ``test``: raises if the library does not behave as the feature
    needs. ``without``: how the program goes on, for the warning. ``library``: the module whose
    ``__version__`` counts. ``tested``: its tested versions, the oldest first; () for a feature that
    uses no private name of the library, which has no oldest version. ``switch``: the field of the
    ``Config`` that turns the feature off; None where the caller asks a setting.
    Threads: any.
    """

    def __init__(
        self,
        feature: str,
        test: Callable[[], None],
        without: str,
        library: str,
        tested: tuple[str, ...],
        switch: str | None = None,
    ) -> None:
        self.feature, self.without = feature, without
        self.library, self.tested = library, tested
        self._test, self._switch = test, switch
        self._lock = threading.RLock()
        self._open: bool | None = None

    def is_wanted(self) -> bool:
        """Whether the switch is on. Nothing is tested."""
        return self._switch is None or is_on(self._switch)

    def is_open(self) -> bool:
        """Whether the feature is on. The first call tests the library, and may warn."""
        if self._open is None:
            with self._lock:
                if self._open is None:
                    why = self._obstacle() if self.is_wanted() else ""
                    self._open = why is None
                    if why:
                        self._warn(why)
        return self._open

    def is_too_old(self) -> bool:
        """Whether the library is older than its oldest tested version."""
        version = self._version()
        return bool(version and self.tested) and _numbers(version) < _numbers(self.tested[0])

    def _version(self) -> str:
        """The library's version; "" where it does not say one."""
        return str(getattr(sys.modules.get(self.library), "__version__", ""))

    def _obstacle(self) -> str | None:
        """Why the feature cannot be on; None if it can."""
        named = f"{self.library} {self._version()}".strip()
        if self.is_too_old():
            return f"{named} is too old"
        try:
            self._test()
        except Exception as error:
            return f"their self-test fails with {named} ({type(error).__name__}: {error})"
        return None

    def _warn(self, why: str) -> None:
        known = f"; tested versions: {', '.join(self.tested)}" if self.tested else ""
        text = f"{self.feature} are off, since {why}{known}. {self.without}"
        warnings.warn(text, RuntimeWarning, stacklevel=4)


def expect(holds: bool, what: str) -> None:
    """Raise RuntimeError with ``what`` unless ``holds``; for self-tests."""
    if not holds:
        raise RuntimeError(what)


def _numbers(version: str) -> tuple[int, ...]:
    """The first three numbers of a version: (2, 13, 0) for "2.13.0a0+cpu"."""
    found = re.match(r"[\d.]*", version)
    numbers = [int(one) for one in found[0].split(".") if one] if found else []
    return (*numbers, 0, 0, 0)[:3]
