"""The versions that all processes of a job must share."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from typing import Any, NamedTuple

from pycoll import __version__

_LABELS = {"pycoll": "pycoll", "python": "Python"}


class Difference(NamedTuple):
    """Two processes have different versions of ``label``. All fields are text."""

    label: str
    mine: str
    theirs: str


def versions() -> dict[str, str]:
    """Return the versions of pycoll, and of Python without its last part."""
    return {"pycoll": __version__, "python": ".".join(platform.python_version_tuple()[:2])}


def difference(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> Difference | None:
    """Return the first difference of two results of ``versions``, which other processes sent.

    A process that sends no version has one that is older than this check.
    """
    for name, label in _LABELS.items():
        one, other = (str(each.get(name, "of an earlier version"))[:40] for each in (mine, theirs))
        if one != other:
            return Difference(label, one, other)
    return None
