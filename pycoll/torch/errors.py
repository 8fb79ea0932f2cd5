"""What collectives of tensors raise, under the names that Horovod's programs catch."""

from __future__ import annotations


class HorovodInternalError(RuntimeError):
    """The ranks disagree about an operation, one of them is gone, or a deadline passed.

    After a disagreement everything can be used further; after the others, elastic programs begin
    anew. ``__cause__`` is pycoll's own error where one was the reason.
    """


class HostsUpdatedInterrupt(RuntimeError):  # noqa: N818  # the name that programs catch
    """The set of hosts has changed; elastic programs save their state and begin anew."""
