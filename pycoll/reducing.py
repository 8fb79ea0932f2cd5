"""The collectives that combine values: all_reduce, reduce, reduce_scatter, scan, exscan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pycoll import _core
from pycoll.arrays import input_of, output_view
from pycoll.collective import Collective
from pycoll.core import Core, Ends, ends_of, finisher, operation, salt
from pycoll.device_view import DeviceView, Where
from pycoll.rows import elements, need_axis, split_rows, with_rows


class Reducing(Core):
    """Part of Communicator. What its collectives have in common:

    ``x``: see ``pycoll.arrays`` for what may be passed; its shape, dtype and the other
    arguments must be alike on all ranks. ``op`` is one of these, or a name from ``register_op``:

    * sum, prod, min, max: integers wrap; floats of 16 and 8 bits are combined in float32, and each
      partial result is rounded to the type. min and max take no complex numbers.
    * avg: integers give the exact mean, rounded towards zero. Floats of 16 and 8 bits are summed in
      float32, in a range that no sum leaves, divided once, and rounded to the type at the end; so
      4 bytes per element travel. float32, float64 and complex are summed in their own type and
      divided at the end, as by numpy.mean: where the sum is infinite, so is the average. Of bool it
      means any. Up to 65,536 ranks.
    * band, bor, bxor: bit by bit, of integers and bool.
    * land, lor, lxor: whether all, any, or an odd number of ranks have an element that is not zero;
      the result is 1 or 0 in the type of x, which may be any. NaN is not zero.
    * maxloc, minloc: x holds pairs along its last axis, of length 2: a value and its place, of one
      type, ``numpy.stack([values, places], -1)``. The pair with the greatest or least value wins,
      of equal values that with the lowest place; zeros of both signs are equal and come out as +0;
      a NaN wins. Integers and real floats; places must be exact in the type (in float32 up to
      2**24). Not on devices, and not in exscan.

    ``out``: where the result goes, of its shape and dtype, writable, and contiguous unless it is on
    a device; x itself to work in place. ``algorithm``: a name, or None for the selector's choice
    (``explain`` tells). ``async_op``: return a Work at once. ``deterministic``: the same bits for
    any algorithm and transport, by folding in rank order; None takes the communicator's setting.
    ``stream``: for arrays on CUDA devices, the stream on which the operation is ordered; None is
    the current one of the array's framework. The host waits for nothing then: what fails is raised
    by a later call, or by ``synchronize()`` of the Work.

    Gradients do not flow through these calls: a tensor that requires grad needs ``out``, or to be
    detached; ``pycoll.torch`` has calls that differentiate.

    Raises InvalidArgumentError before any byte moves, and what the world does: MismatchError,
    PeerLostError, TimeoutError, ClosedError, TransportError.
    """

    @operation
    def all_reduce(
        self,
        x: Any,
        op: Any = "sum",
        *,
        out: Any = None,
        algorithm: str | None = None,
        async_op: bool = False,
        deterministic: bool | None = None,
        stream: Any = None,
    ) -> Any:
        """The combination of all ranks' ``x``, on every rank, with the same bits everywhere.

        Shape and dtype are those of x. Costs about 2 n bytes per rank for long messages, and
        log2(size) steps for short ones.

        A list or tuple of arrays (and of such for ``out``) gives a list of results: its arrays are
        independent, and those of equal dtype and up to 256 KiB travel in one message of up to
        16 MiB; on a device all of one dtype are one launch, up to 128 of them.
        With ``async_op`` results are in their places after ``wait()``.

        >>> comm.all_reduce(np.ones(3))  # on 4 ranks
        array([4., 4., 4.])
        >>> comm.all_reduce([np.ones(2), 5])  # many at once, here too
        [array([4., 4.]), 20]
        """
        if isinstance(x, list | tuple):
            from pycoll.lists import start_list

            work = start_list(self, x, op, out, algorithm, deterministic, stream, async_op)
            return work if async_op else work.wait()
        ends = ends_of(x, out)
        return self._reduce_alike(
            Collective.ALL_REDUCE, x, ends, op, 0, out, algorithm, async_op, deterministic, stream
        )

    @operation
    def reduce(
        self,
        x: Any,
        root: int = 0,
        op: Any = "sum",
        *,
        out: Any = None,
        algorithm: str | None = None,
        async_op: bool = False,
        deterministic: bool | None = None,
        stream: Any = None,
    ) -> Any:
        """The combination of all ranks' ``x``, on ``root``; the others get None.

        Where another rank passes ``out``, it is checked, left as it is, and returned.
        """
        root = self._check_rank(root, "root")
        if self.rank == root:
            ends = ends_of(x, out)
            return self._reduce_alike(
                Collective.REDUCE,
                x,
                ends,
                op,
                root,
                out,
                algorithm,
                async_op,
                deterministic,
                stream,
            )
        framework, source = input_of(x, out)
        if out is not None:
            output_view(out, source.dtype, source.shape, source, True)
        prepared = self._prepare(
            Collective.REDUCE, source.dtype, op, root, source.nbytes, algorithm, deterministic
        )
        prepared.check_shape(source.shape)
        prepared = prepared.of_array(source.shape)
        count = source.count
        where = Where(framework, x, stream)
        return self._start(
            prepared, source, None, source.dtype, [count], count, async_op, lambda: out, where
        )

    @operation
    def reduce_scatter(
        self,
        x: Any,
        op: Any = "sum",
        splits: Sequence[int] | None = None,
        *,
        out: Any = None,
        algorithm: str | None = None,
        async_op: bool = False,
        deterministic: bool | None = None,
        stream: Any = None,
    ) -> Any:
        """Combine all ranks' ``x`` and give every rank its rows of it.

        Rows are split along axis 0: rank r gets ``splits[r]`` of them, alike on all ranks. Without
        ``splits`` it gets ``len(x) // size``, low ranks one more where it does not divide. Costs
        about n bytes per rank.

        >>> comm.reduce_scatter(np.arange(4.0))  # on 2 ranks; this is rank 1
        array([4., 6.])
        """
        framework, source = input_of(x, out)
        need_axis(source.shape, "reduce_scatter")
        rows = split_rows(splits, source.shape[0], self.size)
        told = () if splits is None else (salt("splits"), *rows)
        shape = with_rows(source.shape, rows[self.rank])
        memory, target = self._memory(framework, x, source, shape, source.dtype, out)
        prepared = self._prepare(
            Collective.REDUCE_SCATTER,
            source.dtype,
            op,
            0,
            source.nbytes,
            algorithm,
            deterministic,
            (*told, *source.shape[1:]),
        )
        prepared.check_shape(source.shape, 2)
        prepared = prepared.of_array(source.shape)
        return self._start(
            prepared,
            source,
            target,
            source.dtype,
            elements(rows, source.shape),
            source.count,
            async_op,
            finisher(framework, x, memory, out),
            Where(framework, x, stream),
        )

    @operation
    def scan(
        self,
        x: Any,
        op: Any = "sum",
        *,
        out: Any = None,
        algorithm: str | None = None,
        async_op: bool = False,
        deterministic: bool | None = None,
        stream: Any = None,
    ) -> Any:
        """The combination of ``x`` of ranks 0 to this one, in rank order ("avg" is not defined).

        >>> comm.scan(1)  # on rank 2
        3
        """
        ends = ends_of(x, out)
        return self._reduce_alike(
            Collective.SCAN, x, ends, op, 0, out, algorithm, async_op, deterministic, stream
        )

    @operation
    def exscan(
        self,
        x: Any,
        op: Any = "sum",
        *,
        out: Any = None,
        algorithm: str | None = None,
        async_op: bool = False,
        deterministic: bool | None = None,
        stream: Any = None,
    ) -> Any:
        """The combination of ``x`` of the ranks below this one, in rank order.

        Rank 0 gets what changes nothing under op: 0 for sum, 1 for prod, the type's highest value
        for min, lowest for max, all bits for band. ("avg" is not defined.)

        >>> comm.exscan(1)  # on rank 2
        2
        """
        ends = ends_of(x, out)
        return self._reduce_alike(
            Collective.EXSCAN, x, ends, op, 0, out, algorithm, async_op, deterministic, stream
        )

    def _reduce_alike(
        self,
        collective: Collective,
        x: Any,
        ends: Ends,
        op: Any,
        root: int,
        out: Any,
        algorithm: str | None,
        async_op: bool,
        deterministic: bool | None,
        stream: Any,
    ) -> Any:
        """The engine's part where the result has the shape of x."""
        framework, source, memory, target = ends
        dtype, count = source.dtype, source.count
        prepared = self._prepare(
            collective, dtype, op, root, source.nbytes, algorithm, deterministic
        )
        prepared.check_shape(source.shape)
        prepared = prepared.of_array(source.shape)
        finish = finisher(framework, x, memory, out)
        where = Where(framework, x, stream)
        if collective is Collective.EXSCAN and prepared.reduction is not None:
            identity = prepared.reduction.identity_bytes(dtype)
            if self.rank == 0 and isinstance(target, DeviceView):
                ends_there = (source, target)
                lanes = self._plans.lanes(prepared.plan)
                return self._on_devices().run(
                    prepared,
                    ends_there,
                    dtype,
                    [count],
                    count,
                    lanes,
                    async_op,
                    finish,
                    where,
                    identity,
                )
            if self.rank == 0:
                given = finish

                def finish() -> Any:
                    _core.fill(target, identity)
                    return given()

        return self._start(prepared, source, target, dtype, [count], count, async_op, finish, where)
