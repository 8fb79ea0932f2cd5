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
    check_splits,
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
from pycoll.comm.operations import (
    CallOptions,
    CallRunner,
    Ends,
    ends_of,
    nothing,
    result_memory,
)
from pycoll.errors import InvalidArgumentError
from pycoll.schedule.collectives import Collective
from pycoll.types import ITEM_BYTES, DType, check_rank

if TYPE_CHECKING:
    from pycoll.comm.plans import CallPlan


class DataMovement:
    """Reads and checks the arguments of collectives that move values, and runs them.

    The methods have the promises of the communicator's. ``options``: the arguments that all
    collectives share. ``communicator``: codecs that run themselves call its collectives.
    """

    def __init__(self, runner: CallRunner) -> None:
        self._runner = runner
        self._compile = runner.compiler.compile
        self._exchanges = runner.exchanges
        self._rank = runner.rank
        self._size = runner.size

    def broadcast(
        self,
        communicator: Any,
        x: Any,
        root: int,
        options: CallOptions,
        compress: Any = None,
        feedback: Any = None,
    ) -> Any:
        """Run ``Communicator.broadcast``."""
        out, algorithm, async_op, _, stream = options
        root = check_rank(root, "root", self._size)
        if runs_itself(compress):
            words = {"out": out, "feedback": feedback, "algorithm": algorithm, "stream": stream}
            return compress.broadcast(communicator, x, root, async_op=async_op, **words)
        coding = coding_of(compress, feedback)
        ends = ends_of(x, out)
        source = ends.source
        compiled = self._compile(
            Collective.BROADCAST,
            source.dtype,
            None,
            root,
            source.nbytes,
            algorithm,
            None,
            coding=coding,
        ).of_array(source.shape)
        if self._rank != root:
            ends = ends._replace(source=None)
        return self._runner.run(compiled, ends, x, options, [source.count], feedback=feedback)

    def all_gather(
        self,
        communicator: Any,
        x: Any,
        lengths: Sequence[int] | None,
        options: CallOptions,
        compress: Any = None,
        feedback: Any = None,
    ) -> Any:
        """Run ``Communicator.all_gather``."""
        out, algorithm, async_op, _, stream = options
        if runs_itself(compress):
            words = {"out": out, "feedback": feedback, "algorithm": algorithm, "stream": stream}
            return compress.all_gather(communicator, x, lengths, async_op=async_op, **words)
        coding = coding_of(compress, feedback)
        framework, source = input_of(x, out)
        if coding is not None:
            check_elements(Collective.ALL_GATHER, source.dtype, None)
        rows = self._all_rows(source, lengths, "all_gather")
        ends = Ends(framework, source, None, None)
        return self._gather_to(Collective.ALL_GATHER, x, 0, ends, rows, options, coding, feedback)

    def gather(
        self,
        x: Any,
        root: int,
        splits: Sequence[int] | None,
        lengths: Sequence[int] | None,
        options: CallOptions,
    ) -> Any:
        """Run ``Communicator.gather``."""
        root = check_rank(root, "root", self._size)
        framework, source = input_of(x, options.out)
        _check_one(splits, lengths)
        given, word = (lengths, "lengths") if splits is None else (splits, "splits")
        rows = self._all_rows(source, given, "gather", word)
        ends = Ends(framework, source, None, None)
        return self._gather_to(Collective.GATHER, x, root, ends, rows, options)

    def scatter(self, x: Any, root: int, splits: Sequence[int] | None, options: CallOptions) -> Any:
        """Run ``Communicator.scatter``."""
        root = check_rank(root, "root", self._size)
        exchanges = self._exchanges
        if self._rank != root:
            framework = NUMPY if x is None else framework_of(x)
            numbers = exchanges.broadcast_numbers(None, HEADER_LENGTH, root)
            rows = self._rows_of_header(numbers, root)
            ready = self._compile_scatter(framework, None, x, root, numbers, rows, options)
            return self._runner.run(*ready)
        framework, source = input_of(x, options.out)
        need_axis(source.shape, "scatter")
        rows = split_rows(splits, source.shape[0], self._size)
        numbers = header(source.dtype, source.shape, splits is not None)
        ready = self._compile_scatter(framework, source, x, root, numbers, rows, options)
        exchanges.broadcast_numbers(numbers, HEADER_LENGTH, root)
        if splits is not None:
            exchanges.broadcast_numbers(rows, self._size, root)
        return self._runner.run(*ready)

    def _rows_of_header(self, numbers: Any, root: int) -> list[int]:
        """Return the rows of each rank: from the root's header, or from its next broadcast."""
        if has_splits(numbers):
            return self._exchanges.broadcast_numbers(None, self._size, root)
        return shares(read_header(numbers)[1][0], self._size)

    def _compile_scatter(
        self,
        framework: Framework,
        source: _core.BufferView | None,
        x: Any,
        root: int,
        numbers: Any,
        rows: list[int],
        options: CallOptions,
    ) -> tuple[CallPlan, Ends, Any, CallOptions, list[int]]:
        """Check all arguments, and return those of ``CallRunner.run``."""
        dtype, shape = read_header(numbers)
        counts = elements(rows, shape)
        own = with_rows(shape, rows[self._rank])
        place = sum(counts[: self._rank]) * ITEM_BYTES[dtype]
        memory, target = result_memory(framework, x, source, own, dtype, options.out, place)
        nbytes = sum(counts) * ITEM_BYTES[dtype]
        compiled = self._compile(
            Collective.SCATTER, dtype, None, root, nbytes, options.algorithm, None
        )
        self._runner.check_place(source, target, Where(framework, x, options.stream))
        return compiled, Ends(framework, source, memory, target), x, options, counts

    def all_to_all(
        self,
        x: Any,
        splits: Sequence[int] | None,
        lengths: Sequence[Sequence[int]] | None,
        options: CallOptions,
    ) -> Any:
        """Run ``Communicator.all_to_all``."""
        framework, source = input_of(x, options.out)
        need_axis(source.shape, "all_to_all")
        if lengths is None:
            incoming, counts = self._exchanged_rows(source, splits)
        else:
            incoming, counts = self._known_rows(source, splits, lengths)
        is_equal = splits is None and lengths is None
        dtype = source.dtype
        shape = with_rows(source.shape, incoming)
        memory, target = result_memory(framework, x, source, shape, dtype, options.out)
        compiled = self._compile(
            Collective.ALL_TO_ALL,
            dtype,
            None,
            0,
            sum(counts) // self._size * ITEM_BYTES[dtype],
            options.algorithm,
            None,
            (not is_equal, *source.shape[1:]),
        )
        if is_equal:
            compiled = compiled.of_array(source.shape)
        ends = Ends(framework, source, memory, target)
        return self._runner.run(compiled, ends, x, options, counts)

    def barrier(self, algorithm: str | None, async_op: bool) -> Any:
        """Run ``Communicator.barrier``."""
        compiled = self._compile(Collective.BARRIER, DType.UINT8, None, 0, 0, algorithm, None)
        offer = (False, None, b"")
        return self._runner.start(compiled, None, None, [], async_op, nothing, None, offer)

    def _all_rows(
        self,
        source: _core.BufferView,
        lengths: Sequence[int] | None,
        name: str,
        word: str = "lengths",
    ) -> list[int]:
        """Return the rows of each rank: the caller's ``lengths``, or those of an exchange."""
        if lengths is None:
            mine = signature(source.dtype, source.shape)
            return agreed_rows(self._exchanges.all_gather_numbers(mine, name), name)
        rows = check_rows(lengths, word, self._size)
        own = source.shape[0] if source.shape else 1
        if rows[self._rank] != own:
            raise InvalidArgumentError(
                f"{word}[{self._rank}] is {rows[self._rank]}, but x of this rank has {own} rows"
            )
        return rows

    def _gather_to(
        self,
        collective: Collective,
        x: Any,
        root: int,
        ends: Ends,
        rows: list[int],
        options: CallOptions,
        coding: Coding | None = None,
        feedback: Any = None,
    ) -> Any:
        """Compile and run a gather of ``rows`` of each rank; ``ends`` have no target yet."""
        framework, source, _, _ = ends
        row_shape = source.shape or (1,)
        item = ITEM_BYTES[source.dtype]
        counts = elements(rows, row_shape)
        if collective is Collective.ALL_GATHER or self._rank == root:
            shape = with_rows(row_shape, sum(rows))
            place = sum(counts[: self._rank]) * item
            memory, target = result_memory(
                framework, x, source, shape, source.dtype, options.out, place
            )
            ends = Ends(framework, source, memory, target)
        compiled = self._compile(
            collective,
            source.dtype,
            None,
            root,
            sum(counts) * item,
            options.algorithm,
            None,
            row_shape[1:],
            coding,
        )
        return self._runner.run(compiled, ends, x, options, counts, feedback=feedback)

    def _exchanged_rows(
        self, source: _core.BufferView, splits: Sequence[int] | None
    ) -> tuple[int, list[int]]:
        """Return the rows that this rank receives, and the elements of each block of all ranks."""
        size, rows = self._size, source.shape[0]
        if splits is None:
            if rows % size:
                raise InvalidArgumentError(
                    f"x has {rows} rows, which {size} ranks cannot share equally: pass splits="
                )
            each = elements([rows // size], source.shape)[0]
            return rows, [each] * (size * size)
        mine = check_splits(splits, rows, size)
        own = signature(source.dtype, source.shape) + mine
        lines = self._exchanges.all_gather_numbers(own, "all_to_all")
        agreed_rows(lines, "all_to_all")
        return self._blocks([line[SIGNATURE_LENGTH:] for line in lines], source)

    def _known_rows(
        self, source: _core.BufferView, splits: Any, lengths: Sequence[Sequence[int]]
    ) -> tuple[int, list[int]]:
        """Return the rows of each rank, from the ``splits`` of all ranks."""
        size = self._size
        _check_one(splits, lengths)
        if not isinstance(lengths, Sequence | np.ndarray) or len(lengths) != size:
            raise InvalidArgumentError(
                f"lengths is {lengths!r}: expected {size} sequences, the splits of each rank"
            )
        table = [check_rows(line, f"lengths[{rank}]", size) for rank, line in enumerate(lengths)]
        check_splits(table[self._rank], source.shape[0], size, f"lengths[{self._rank}]")
        return self._blocks(table, source)

    def _blocks(
        self, table: Sequence[Sequence[int]], source: _core.BufferView
    ) -> tuple[int, list[int]]:
        """Return the rows that this rank receives, and the elements of each block of all ranks."""
        counts = [n for line in table for n in elements(line, source.shape)]
        return sum(line[self._rank] for line in table), counts


def _check_one(splits: Any, lengths: Any) -> None:
    """Raise InvalidArgumentError if both arguments are given."""
    if splits is not None and lengths is not None:
        raise InvalidArgumentError("splits and lengths mean the same: pass one of them")
