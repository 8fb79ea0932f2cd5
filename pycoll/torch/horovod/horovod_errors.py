"""The errors of operations, under the names that programs for Horovod catch."""

from __future__ import annotations


class HorovodInternalError(RuntimeError):
    """The ranks disagree about an operation, a rank was lost, or a deadline passed.

    After a disagreement the world stays usable. After a lost rank or a deadline it does not;
    elastic programs then begin anew. ``__cause__`` is the error of pycoll where one was the reason.
    """


class HostsUpdatedInterrupt(RuntimeError):  # noqa: N818  # the name that programs catch
    """The number of slots has changed; elastic programs keep their state and join a new world."""
