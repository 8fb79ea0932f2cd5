"""The collectives that move values: broadcast, all_gather, gather, scatter, all_to_all, barrier."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from pycoll import _core
from pycoll.arrays.device_view import Where
from pycoll.arrays.host_arrays import NUMPY, Framework
from pycoll.arrays.registry import framework_of, input_of
from pycoll.arrays.rows import (
    HEADER_LENGTH,
    SIGNATURE_LENGTH,
    agreed_rows,
    check_rows,
    elements,
    has_splits,
    header,
    need_axis,
    read_header,
    shares,
    signature,
    split_rows,
    with_rows,
)
from pycoll.comm.codecs import Coding, check_elements, coding_of, runs_itself
from pycoll.comm.operations import Core, Ends, ends_of, nothing, operation
from pycoll.errors import InvalidArgumentError
from pycoll.schedule.collectives import Collective
from pycoll.types import ITEM_BYTES, DType

if TYPE_CHECKING:
    from pycoll.comm.plans import Prepared


class Moving(Core):
    """The collectives that move values; one of the base classes of Communicator.

    The docstring of Communicator lists the arguments and errors that all collectives share.
    """

    @operation
    def broadcast(
        self,
        x: Any,
        root: int = 0,
        *,
        out: Any = None,
        algorithm: str | None = None,
        async_op: bool = False,
        stream: Any = None,
        compress: Any = None,
        feedback: Any = None,
    ) -> Any:
        """Copy the root's ``x`` to every rank.

        ``x``: an array with the same shape and dtype on all ranks; only the root's values count.
        ``root``: the sending rank, from 0 to size - 1, the same on all ranks. ``out``: None for a
        new array, an array of the shape and dtype of x, or x itself. ``compress``, ``feedback``: as
        in all_reduce; the root encodes its values once, and all ranks, the root included, get what
        the codes decode to. The other arguments are those of all collectives, see Communicator.

        Returns an array with the shape and dtype of x, or ``out``; with ``async_op``, a Work of
        that.

        Raises the errors of all collectives, see Communicator.

        Cost: for long messages every rank receives n bytes and sends about n; for short ones
        log2(size) steps. Algorithms: direct exchange, binomial tree and chain (Thakur, Rabenseifner
        and Gropp 2005), double binary tree (Sanders, Speck and Träff 2009), scatter and all_gather
        (Barnett et al. 1994).

        >>> comm.broadcast(np.full(2, comm.rank), root=1)  # on 3 ranks
        array([1, 1])
        """
        root = self._check_rank(root, "root")
        if runs_itself(compress):
            words = {"out": out, "feedback": feedback, "algorithm": algorithm, "stream": stream}
            return compress.broadcast(self, x, root, async_op=async_op, **words)
        coding = coding_of(compress, feedback)
        ends = ends_of(x, out)
        source = ends.source
        prepared = self._prepare(
            Collective.BROADCAST,
            source.dtype,
            None,
            root,
            source.nbytes,
            algorithm,
            None,
            coding=coding,
        ).of_array(source.shape)
        if self.rank != root:
            ends = ends._replace(source=None)
        return self._run(
            prepared, ends, x, out, [source.count], async_op, stream, feedback=feedback
        )

    @operation
    def all_gather(
        self,
        x: Any,
        *,
        lengths: Sequence[int] | None = None,
        out: Any = None,
        algorithm: str | None = None,
        async_op: bool = False,
        stream: Any = None,
        compress: Any = None,
        feedback: Any = None,
    ) -> Any:
        """Join the arrays ``x`` of all ranks along axis 0, in rank order; every rank gets all rows.

        ``x``: an array; its first dimension may differ between ranks, its dtype and its other
        dimensions must not. A 0-d array or a number counts as one row. ``lengths``: the first
        dimension of each rank, the same sequence on all ranks; None lets the ranks exchange their
        first dimensions beforehand, also with ``async_op``. ``out``: an array with the rows of all
        ranks; on the host x may be this rank's rows of it, and the rest of ``out`` is not read.
        ``compress``, ``feedback``: as in all_reduce; each rank encodes its rows once, and all
        ranks, itself included, get what the codes decode to. The other arguments are those of all
        collectives, see Communicator.

        Returns an array with the rows of all ranks and the dtype of x, or ``out``; with
        ``async_op``, a Work of that.

        Raises the errors of all collectives, see Communicator. Where dtypes or trailing dimensions
        differ and ``lengths`` is None, it raises MismatchError and the communicator stays usable.

        Cost: every rank receives the rows of all other ranks, and without ``lengths`` an exchange
        of ten numbers per rank first. Algorithms: ring (Patarasu and Yuan 2009), direct exchange
        and recursive doubling (Thakur, Rabenseifner and Gropp 2005), Bruck et al. 1997.

        >>> comm.all_gather(np.full((comm.rank, 2), comm.rank)).shape  # on 3 ranks
        (3, 2)
        """
        if runs_itself(compress):
            words = {"out": out, "feedback": feedback, "algorithm": algorithm, "stream": stream}
            return compress.all_gather(self, x, lengths, async_op=async_op, **words)
        coding = coding_of(compress, feedback)
        framework, source = input_of(x, out)
        if coding is not None:
            check_elements(Collective.ALL_GATHER, source.dtype, None)
        rows = self._all_rows(source, lengths, "all_gather")
        return self._gather_to(
            Collective.ALL_GATHER,
            0,
            framework,
            x,
            source,
            rows,
            out,
            algorithm,
            async_op,
            stream,
            coding,
            feedback,
        )

    @operation
    def gather(
        self,
        x: Any,
        root: int = 0,
        splits: Sequence[int] | None = None,
        *,
        lengths: Sequence[int] | None = None,
        out: Any = None,
        algorithm: str | None = None,
        async_op: bool = False,
        stream: Any = None,
    ) -> Any:
        """Join the arrays ``x`` of all ranks along axis 0, in rank order, on ``root`` only.

        ``x``: as in all_gather. ``root``: the receiving rank, from 0 to size - 1, the same on all
        ranks. ``splits`` or ``lengths``: the rows of each rank, as ``lengths`` of all_gather; the
        two names mean the same, and a call passes at most one of them. ``out``: on the root an
        array with the rows of all ranks, of which x may be the root's own rows; on another rank it
        is not used. The other arguments are those of all collectives, see Communicator.

        Returns on the root an array with the rows of all ranks, or ``out``. Returns on another rank
        its ``out``, or None. With ``async_op`` returns a Work of that.

        Raises the errors of all_gather.

        Cost: the root receives the rows of all other ranks; without ``splits`` or ``lengths`` all
        ranks exchange ten numbers each first. Algorithms: direct exchange and binomial tree
        (Thakur, Rabenseifner and Gropp 2005).

        >>> comm.gather(np.full(1, comm.rank))  # on 2 ranks; this is rank 0
        array([0, 1])
        """
        root = self._check_rank(root, "root")
        framework, source = input_of(x, out)
        if splits is not None and lengths is not None:
            raise InvalidArgumentError("splits and lengths mean the same: pass one of them")
        given, word = (lengths, "lengths") if splits is None else (splits, "splits")
        rows = self._all_rows(source, given, "gather", word)
        return self._gather_to(
            Collective.GATHER, root, framework, x, source, rows, out, algorithm, async_op, stream
        )

    @operation
    def scatter(
        self,
        x: Any = None,
        root: int = 0,
        splits: Sequence[int] | None = None,
        *,
        out: Any = None,
        algorithm: str | None = None,
        async_op: bool = False,
        stream: Any = None,
    ) -> Any:
        """Split the root's ``x`` along axis 0; every rank gets its rows.

        ``x``: on the root an array of at least one axis. Another rank need not know its shape or
        dtype, since the root sends them beforehand, also with ``async_op``; there the type of x is
        the type of the result, and None means a NumPy array. ``root``: the sending rank, from 0 to
        size - 1, the same on all ranks. ``splits``: on the root one number of rows per rank, with
        the sum ``len(x)``; rank r gets the next ``splits[r]`` rows. With None every rank gets
        ``len(x) // size`` rows, and the lowest ranks get one more each where size does not divide
        ``len(x)``. ``splits`` of other ranks does not count. ``out``: on the root, on the host, it
        may be the root's own rows of x. The other arguments are those of all collectives, see
        Communicator.

        Returns this rank's rows, with the trailing dimensions and dtype of the root's x, or
        ``out``; with ``async_op``, a Work of that.

        Raises the errors of all collectives, see Communicator.

        Cost: every rank receives its rows, after a broadcast of the shape and dtype and, with
        ``splits``, one of the rows. Algorithms: direct exchange and binomial tree (Thakur,
        Rabenseifner and Gropp 2005).

        >>> comm.scatter(np.arange(4.0) if comm.rank == 0 else None)  # on 2 ranks; this is rank 1
        array([2., 3.])
        """
        root = self._check_rank(root, "root")
        if self.rank != root:
            framework = NUMPY if x is None else framework_of(x)
            numbers = self._broadcast_numbers(None, HEADER_LENGTH, root)
            rows = self._rows_of_header(numbers, root)
            ready = self._scatter_ready(
                framework, None, x, root, numbers, rows, out, algorithm, stream
            )
            return self._run(*ready, async_op, stream)
        framework, source = input_of(x, out)
        need_axis(source.shape, "scatter")
        rows = split_rows(splits, source.shape[0], self.size)
        numbers = header(source.dtype, source.shape, splits is not None)
        ready = self._scatter_ready(
            framework, source, x, root, numbers, rows, out, algorithm, stream
        )
        self._broadcast_numbers(numbers, HEADER_LENGTH, root)
        if splits is not None:
            self._broadcast_numbers(rows, self.size, root)
        return self._run(*ready, async_op, stream)

    def _rows_of_header(self, numbers: Any, root: int) -> list[int]:
        """Return the rows of each rank: from the root's header, or from its next broadcast."""
        if has_splits(numbers):
            return self._broadcast_numbers(None, self.size, root)
        return shares(read_header(numbers)[1][0], self.size)

    def _scatter_ready(
        self,
        framework: Framework,
        source: _core.BufferView | None,
        x: Any,
        root: int,
        numbers: Any,
        rows: list[int],
        out: Any,
        algorithm: str | None,
        stream: Any,
    ) -> tuple[Prepared, Ends, Any, Any, list[int]]:
        """Check all arguments, and return the first arguments of ``_run``."""
        dtype, shape = read_header(numbers)
        counts = elements(rows, shape)
        own = with_rows(shape, rows[self.rank])
        place = sum(counts[: self.rank]) * ITEM_BYTES[dtype]
        memory, target = self._memory(framework, x, source, own, dtype, out, place)
        nbytes = sum(counts) * ITEM_BYTES[dtype]
        prepared = self._prepare(Collective.SCATTER, dtype, None, root, nbytes, algorithm, None)
        self._check_place(source, target, Where(framework, x, stream))
        return prepared, Ends(framework, source, memory, target), x, out, counts

    @operation
    def all_to_all(
        self,
        x: Any,
        splits: Sequence[int] | None = None,
        *,
        lengths: Sequence[Sequence[int]] | None = None,
        out: Any = None,
        algorithm: str | None = None,
        async_op: bool = False,
        stream: Any = None,
    ) -> Any:
        """Send rows of ``x`` to every rank, and join the rows from every rank in rank order.

        ``x``: an array of at least one axis; its dtype and all dimensions but the first must be the
        same on all ranks. ``splits``: one number of rows per rank, with the sum ``len(x)``; rank r
        gets the next ``splits[r]`` rows. With None every rank gets an equal share; then size must
        divide ``len(x)``, and the shape of x must be the same on all ranks. Either all ranks pass
        ``splits`` or none does. ``lengths``: where all ranks know them, the ``splits`` of all
        ranks, one sequence for each rank, the same on all ranks; then ``splits`` is None. ``out``:
        memory apart from x. The other arguments are those of all collectives, see Communicator.

        Returns the joined rows, with the trailing dimensions and dtype of x, or ``out``; with
        ``async_op``, a Work of that.

        Raises the errors of all collectives, see Communicator.

        Cost: every rank sends the rows of x for the other ranks. With ``splits`` the ranks exchange
        them beforehand, also with ``async_op``; with ``lengths`` they do not. Algorithms: direct
        exchange, and Bruck et al. 1997 for short messages.

        >>> comm.all_to_all(np.array([0, 1]) + 10 * comm.rank)  # on 2 ranks; this is rank 1
        array([ 1, 11])
        """
        framework, source = input_of(x, out)
        need_axis(source.shape, "all_to_all")
        if lengths is None:
            incoming, counts = self._exchanged_rows(source, splits)
        else:
            incoming, counts = self._known_rows(source, splits, lengths)
        is_equal = splits is None and lengths is None
        shape = with_rows(source.shape, incoming)
        memory, target = self._memory(framework, x, source, shape, source.dtype, out)
        total = sum(counts)
        prepared = self._prepare(
            Collective.ALL_TO_ALL,
            source.dtype,
            None,
            0,
            total // self.size * ITEM_BYTES[source.dtype],
            algorithm,
            None,
            (not is_equal, *source.shape[1:]),
        )
        if is_equal:
            prepared = prepared.of_array(source.shape)
        ends = Ends(framework, source, memory, target)
        return self._run(prepared, ends, x, out, counts, async_op, stream)

    @operation
    def barrier(self, *, algorithm: str | None = None, async_op: bool = False) -> Any:
        """Wait until every rank has called this barrier.

        ``algorithm`` and ``async_op``: as in all collectives, see Communicator.

        Returns None; with ``async_op``, a Work whose ``wait()`` returns None.

        Raises the errors of all collectives, see Communicator.

        Cost: log2(size) steps of a few bytes. Algorithms: dissemination (Hensgen, Finkel and Manber
        1988), recursive doubling and direct exchange (Thakur, Rabenseifner and Gropp 2005).

        >>> comm.barrier()
        """
        prepared = self._prepare(Collective.BARRIER, DType.UINT8, None, 0, 0, algorithm, None)
        offer = (False, None, b"")
        return self._start(prepared, None, None, [], async_op, nothing, None, offer)

    def _all_rows(
        self,
        source: _core.BufferView,
        lengths: Sequence[int] | None,
        name: str,
        word: str = "lengths",
    ) -> list[int]:
        """Return the rows of each rank: the caller's ``lengths``, or those of an exchange."""
        if lengths is None:
            signatures = self._all_gather_numbers(signature(source.dtype, source.shape), name)
            return agreed_rows(signatures, name)
        rows = check_rows(lengths, word, self.size)
        mine = source.shape[0] if source.shape else 1
        if rows[self.rank] != mine:
            raise InvalidArgumentError(
                f"{word}[{self.rank}] is {rows[self.rank]}, but x of this rank has {mine} rows"
            )
        return rows

    def _gather_to(
        self,
        collective: Collective,
        root: int,
        framework: Framework,
        x: Any,
        source: _core.BufferView,
        rows: list[int],
        out: Any,
        algorithm: str | None,
        async_op: bool,
        stream: Any,
        coding: Coding | None = None,
        feedback: Any = None,
    ) -> Any:
        row_shape = source.shape or (1,)
        counts = elements(rows, row_shape)
        total = sum(counts)
        memory, target = None, None
        receives = collective is Collective.ALL_GATHER or self.rank == root
        if receives:
            shape = with_rows(row_shape, sum(rows))
            place = sum(counts[: self.rank]) * ITEM_BYTES[source.dtype]
            memory, target = self._memory(framework, x, source, shape, source.dtype, out, place)
        prepared = self._prepare(
            collective,
            source.dtype,
            None,
            root,
            total * ITEM_BYTES[source.dtype],
            algorithm,
            None,
            row_shape[1:],
            coding,
        )
        ends = Ends(framework, source, memory, target)
        return self._run(prepared, ends, x, out, counts, async_op, stream, feedback=feedback)

    def _exchanged_rows(
        self, source: _core.BufferView, splits: Sequence[int] | None
    ) -> tuple[int, list[int]]:
        """Return the rows that this rank receives, and the elements of each block of all ranks."""
        size, rows = self.size, source.shape[0]
        if splits is None:
            if rows % size:
                raise InvalidArgumentError(
                    f"x has {rows} rows, which {size} ranks cannot share equally: pass splits="
                )
            each = elements([rows // size], source.shape)[0]
            return rows, [each] * (size * size)
        mine = check_rows(splits, "splits", size)
        if sum(mine) != rows:
            raise InvalidArgumentError(f"splits add up to {sum(mine)}, but x has {rows} rows")
        own = signature(source.dtype, source.shape) + mine
        lines = self._all_gather_numbers(own, "all_to_all")
        agreed_rows(lines, "all_to_all")
        return self._blocks([line[SIGNATURE_LENGTH:] for line in lines], source)

    def _known_rows(
        self, source: _core.BufferView, splits: Any, lengths: Sequence[Sequence[int]]
    ) -> tuple[int, list[int]]:
        """Return the rows of each rank, from the ``splits`` of all ranks."""
        if splits is not None:
            raise InvalidArgumentError("splits and lengths mean the same: pass one of them")
        if not isinstance(lengths, Sequence | np.ndarray) or len(lengths) != self.size:
            raise InvalidArgumentError(
                f"lengths is {lengths!r}: expected {self.size} sequences, the splits of each rank"
            )
        table = [
            check_rows(line, f"lengths[{rank}]", self.size) for rank, line in enumerate(lengths)
        ]
        rows = source.shape[0]
        if sum(table[self.rank]) != rows:
            raise InvalidArgumentError(
                f"lengths[{self.rank}] adds up to {sum(table[self.rank])}, but x has {rows} rows"
            )
        return self._blocks(table, source)

    def _blocks(
        self, table: Sequence[Sequence[int]], source: _core.BufferView
    ) -> tuple[int, list[int]]:
        """Return the rows that this rank receives, and the elements of each block of all ranks."""
        counts = [n for line in table for n in elements(line, source.shape)]
        return sum(line[self.rank] for line in table), counts
