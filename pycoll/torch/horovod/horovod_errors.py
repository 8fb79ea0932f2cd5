"""The errors of operations, under the names that programs for Horovod catch."""

from __future__ import annotations


class HorovodInternalError(RuntimeError):
    """The ranks disagree about an operation, a rank was lost, or a deadline passed.

    After a disagreement the world stays usable. After a lost rank or a deadline it does not;
    elastic programs then begin anew. ``__cause__`` is the error of pycoll where one was the reason.

    Arguments: a text. Errors and cost: none.

    >>> try:
    ...     hvd.reducescatter(torch.ones(2), op=hvd.Adasum)
    ... except hvd.HorovodInternalError as error:
    ...     print(error)
    op is Adasum, which reducescatter does not support: use allreduce
    """


class HostsUpdatedInterrupt(RuntimeError):  # noqa: N818  # the name that programs catch
    """The number of slots has changed; elastic programs keep their state and join a new world."""
