"""The collectives that move values: broadcast, all_gather, gather, scatter, all_to_all, barrier."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pycoll import _core
from pycoll.arrays import NUMPY, Framework, framework_of, input_of
from pycoll.collective import Collective
from pycoll.core import Core, ends_of, finisher, nothing, operation
from pycoll.device_view import Where
from pycoll.errors import InvalidArgumentError
from pycoll.rows import (
    HEADER_LENGTH,
    SIGNATURE_LENGTH,
    agreed_rows,
    check_rows,
    elements,
    header,
    need_axis,
    read_header,
    shares,
    signature,
    split_rows,
    tells_splits,
    with_rows,
)
from pycoll.types import ITEM_BYTES, DType


class Moving(Core):
    """Part of Communicator. ``x``, ``out``, ``stream`` and the other common words: see Reducing."""

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
    ) -> Any:
        """The root's ``x``, on every rank, as a new array (or in ``out``).

        Every rank passes an x of the same shape and dtype; only the root's values matter.
        """
        root = self._check_rank(root, "root")
        framework, source, memory, target = ends_of(x, out)
        dtype, count = source.dtype, source.count
        prepared = self._prepare(
            Collective.BROADCAST, dtype, None, root, source.nbytes, algorithm, None
        ).of_array(source.shape)
        return self._start(
            prepared,
            source if self.rank == root else None,
            target,
            dtype,
            [count],
            count,
            async_op,
            finisher(framework, x, memory, out),
            Where(framework, x, stream),
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
    ) -> Any:
        """All ranks' ``x``, joined along axis 0 in rank order, on every rank.

        First dimensions may differ between ranks, the others must not. The ranks tell each other
        their first dimensions beforehand, also with ``async_op``; ``lengths``, one per rank and
        alike on all, saves that. A 0-d array or number counts as one row.

        ``x`` may be this rank's rows of ``out``, on the host: then nothing else of it is read.

        Raises MismatchError, and leaves the communicator usable, where dtypes or trailing
        dimensions differ.

        >>> comm.all_gather(np.full((comm.rank, 2), comm.rank)).shape  # on 3 ranks
        (3, 2)
        """
        framework, source = input_of(x, out)
        rows = self._all_rows(source, lengths, "all_gather")
        return self._gather_to(
            Collective.ALL_GATHER, 0, framework, x, source, rows, out, algorithm, async_op, stream
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
        """All ranks' ``x``, joined along axis 0 as in all_gather, on ``root``; None elsewhere.

        ``splits``, rows of each rank, is what ``lengths`` is in all_gather, under the name that the
        argument of scatter has; one of the two may be given.

        ``out`` counts on the root only, whose ``x`` may be its own rows of it; another rank's is
        returned as it is.
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
        """The rows of the root's ``x``, split along axis 0 as in reduce_scatter.

        ``splits`` counts on the root only: rank r gets the next ``splits[r]`` rows.

        Other ranks need not know shape or dtype: the root tells them beforehand, also with
        ``async_op``. There x only says what kind of array to return (NumPy if it is None). On the
        root, ``out`` may be its own rows of ``x``, on the host.
        """
        root = self._check_rank(root, "root")
        if self.rank != root:
            framework = NUMPY if x is None else framework_of(x)
            told = self._broadcast_numbers(None, HEADER_LENGTH, root)
            rows = self._told_rows(told, root)
            return self._start(
                *self._scatter_ready(
                    framework, None, x, root, told, rows, out, algorithm, async_op, stream
                )
            )
        framework, source = input_of(x, out)
        need_axis(source.shape, "scatter")
        rows = split_rows(splits, source.shape[0], self.size)
        told = header(source.dtype, source.shape, splits is not None)
        ready = self._scatter_ready(
            framework, source, x, root, told, rows, out, algorithm, async_op, stream
        )
        self._broadcast_numbers(told, HEADER_LENGTH, root)
        if splits is not None:
            self._broadcast_numbers(rows, self.size, root)
        return self._start(*ready)

    def _told_rows(self, told: Any, root: int) -> list[int]:
        """Rows of each rank, as the root's header says or as it tells next."""
        if tells_splits(told):
            return self._broadcast_numbers(None, self.size, root)
        return shares(read_header(told)[1][0], self.size)

    def _scatter_rest(
        self, x: Any, root: int, told: Any, out: Any, algorithm: str | None, async_op: bool
    ) -> Any:
        """For native calls that had told the header and could not go on."""
        self._exchanged = calls = self._native.calls()
        try:
            framework = NUMPY if x is None else framework_of(x)
            source = framework.view(x, "x") if self.rank == root else None
            rows = self._told_rows(told, root)
            return self._start(
                *self._scatter_ready(
                    framework, source, x, root, told, rows, out, algorithm, async_op, None
                )
            )
        except Exception as error:
            self._failed(error, "scatter", calls)
            raise

    def _scatter_ready(
        self,
        framework: Framework,
        source: _core.BufferView | None,
        x: Any,
        root: int,
        told: Any,
        rows: list[int],
        out: Any,
        algorithm: str | None,
        async_op: bool,
        stream: Any,
    ) -> tuple[Any, ...]:
        """All that ``_start`` takes; every argument has been looked at."""
        dtype, shape = read_header(told)
        counts = elements(rows, shape)
        own = with_rows(shape, rows[self.rank])
        place = sum(counts[: self.rank]) * ITEM_BYTES[dtype]
        memory, target = self._memory(framework, x, source, own, dtype, out, place)
        nbytes = sum(counts) * ITEM_BYTES[dtype]
        prepared = self._prepare(Collective.SCATTER, dtype, None, root, nbytes, algorithm, None)
        where = Where(framework, x, stream)
        self._check_place(source, target, where)
        return (
            prepared,
            source,
            target,
            dtype,
            counts,
            sum(counts),
            async_op,
            finisher(framework, x, memory, out),
            where,
        )

    @operation
    def all_to_all(
        self,
        x: Any,
        splits: Sequence[int] | None = None,
        *,
        out: Any = None,
        algorithm: str | None = None,
        async_op: bool = False,
        stream: Any = None,
    ) -> Any:
        """Rows of ``x`` to every rank, and rows from every rank joined in rank order.

        Without ``splits`` every rank gets an equal share, so ``len(x)`` must divide by size. With
        it, rank r gets the next ``splits[r]`` rows; the ranks then tell each other their splits
        beforehand, also with ``async_op``. Either all ranks pass splits or none does.

        >>> comm.all_to_all(np.array([0, 1]) + 10 * comm.rank)  # on 2 ranks; this is rank 1
        array([ 1, 11])
        """
        framework, source = input_of(x, out)
        need_axis(source.shape, "all_to_all")
        incoming, counts = self._exchanged_rows(source, splits)
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
            (splits is not None, *source.shape[1:]),
        )
        if splits is None:
            prepared = prepared.of_array(source.shape)
        return self._start(
            prepared,
            source,
            target,
            source.dtype,
            counts,
            total,
            async_op,
            finisher(framework, x, memory, out),
            Where(framework, x, stream),
        )

    @operation
    def barrier(self, *, algorithm: str | None = None, async_op: bool = False) -> Any:
        """Return when every rank has come here. Costs log2(size) steps of a few bytes."""
        prepared = self._prepare(Collective.BARRIER, DType.UINT8, None, 0, 0, algorithm, None)
        return self._start(prepared, None, None, DType.UINT8, [], 0, async_op, nothing)

    def _all_rows(
        self,
        source: _core.BufferView,
        lengths: Sequence[int] | None,
        name: str,
        word: str = "lengths",
    ) -> list[int]:
        """Rows of each rank, as told by the caller or by all ranks."""
        if lengths is None:
            told = self._all_gather_numbers(signature(source.dtype, source.shape), name)
            return agreed_rows(told, name)
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
        )
        finish = finisher(framework, x, memory, out) if receives else lambda: out
        where = Where(framework, x, stream)
        return self._start(
            prepared, source, target, source.dtype, counts, total, async_op, finish, where
        )

    def _exchanged_rows(
        self, source: _core.BufferView, splits: Sequence[int] | None
    ) -> tuple[int, list[int]]:
        """Rows that come here, and elements of each block of the whole exchange."""
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
        told = self._all_gather_numbers(signature(source.dtype, source.shape) + mine, "all_to_all")
        agreed_rows(told, "all_to_all")
        table = [line[SIGNATURE_LENGTH:] for line in told]
        counts = [n for line in table for n in elements(line, source.shape)]
        return sum(line[self.rank] for line in table), counts
