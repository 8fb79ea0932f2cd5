"""The collectives that combine values: all_reduce, reduce, reduce_scatter, scan, exscan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pycoll.arrays.registry import input_of, output_view
from pycoll.arrays.rows import elements, need_axis, split_rows, with_rows
from pycoll.comm.codecs import Coding, check_elements, coding_of, runs_itself
from pycoll.comm.operations import PS, Core, Ends, asks_for_servers, ends_of, operation, salt
from pycoll.schedule.collectives import Collective
from pycoll.types import ReduceOp

if TYPE_CHECKING:
    from pycoll.compress.sparse import TopK


class Reducing(Core):
    """The reducing collectives; one of the base classes of Communicator.

    The docstring of Communicator lists the arguments and errors that all collectives share. ``op``
    is a name from ``register_op`` or one of these:

    * sum, prod, min, max: integers wrap. Floats of 16 and 8 bits are combined in float32, and each
      partial result is rounded to the type. min and max take no complex numbers.
    * avg: the mean, for up to 65,536 ranks. Integers give the exact mean, rounded towards zero.
      Floats of 16 and 8 bits are summed in float32, scaled so that no sum overflows, divided once,
      and rounded to the type at the end; therefore 4 bytes per element travel. float32, float64
      and complex values are summed in their own type and divided at the end, as numpy.mean does:
      an infinite sum gives an infinite average. The average of bool is true if any value is true.
    * band, bor, bxor: bit by bit, for integers and bool.
    * land, lor, lxor: whether all, any, or an odd number of ranks have a nonzero element. The
      result is 1 or 0 in the type of x; x may have any type. NaN counts as nonzero.
    * maxloc, minloc: the last axis of x has length 2 and holds pairs of a value and its place, both
      of one type: ``numpy.stack([values, places], -1)``. The pair with the greatest or least value
      wins; of equal values the one with the lowest place. Zeros of both signs are equal, and the
      result is +0. A NaN wins. x has integers or real floats, and the type must hold the places
      exactly (float32 does up to 2**24). Neither exscan nor device arrays take these two.
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
        compress: Any = None,
        feedback: Any = None,
    ) -> Any:
        """Combine the arrays ``x`` of all ranks; every rank gets the result with the same bits.

        ``x``: an array with the same shape and dtype on all ranks, or a list or tuple of arrays.
        ``op``: the reduction (docs/reductions.md). ``out``: None for a new array, an array of the
        shape and dtype of x, or x itself; for a list, a list of as many arrays. ``compress``: None,
        or a codec of pycoll.compress, the same on all ranks. With one, x is float16, bfloat16,
        float32 or float64 and ``op`` "sum" or "avg"; on a device it is not float64, and the codec
        keeps every element or is TopK (docs/gpu.md). ``feedback``: None, or a
        pycoll.compress.Feedback of this array or list, which keeps what the codec leaves out for
        the next call. The other arguments are those of all collectives, see Communicator.

        With a codec that keeps every element, such as ``Block("int8")``, each rank encodes what it
        sends; one rank folds a part of the array in full precision, in rank order, and encodes it
        once; all ranks, that one included, get what these codes decode to. So no value is rounded
        more than twice. Codes and sums are float32: results of 16 bits are rounded once more at the
        end, and values of float64 once at the beginning. If there are several hosts, data in host
        memory keeps full precision between the ranks of a host.

        The arrays of a list are independent of each other. Those of equal dtype and up to 256 KiB
        travel in messages of up to 16 MiB. On a device up to 128 arrays of one dtype are one
        kernel launch.

        Returns an array with the shape and dtype of x, or ``out``; for a list, a list of results;
        with ``async_op``, a Work of that. The results are in place after ``wait()``.

        Raises the errors of all collectives, see Communicator.

        Cost: for long messages of n bytes about 2 n bytes sent per rank; for short ones log2(size)
        steps. Algorithms: direct exchange, star, chain and recursive doubling (Thakur, Rabenseifner
        and Gropp 2005), ring (Patarasu and Yuan 2009), double binary tree (Sanders, Speck and
        Träff 2009), halving-doubling (Rabenseifner 2004), recursive multiplying (Ruefenacht, Bull
        and Booth 2017), parameter servers (Li et al. 2014, Jiang et al. 2020), and hierarchies of
        these. ``algorithm="ps"`` takes the best algorithm with servers, in a job that has some.

        >>> comm.all_reduce(np.ones(3))  # on 4 ranks
        array([4., 4., 4.])
        >>> comm.all_reduce([np.ones(2), 5])  # many at once, here too
        [array([4., 4.]), 20]
        """
        words: dict[str, Any] = {
            "out": out,
            "algorithm": algorithm,
            "async_op": async_op,
            "deterministic": deterministic,
            "stream": stream,
        }
        if runs_itself(compress):
            return compress.all_reduce(self, x, op, feedback=feedback, **words)
        coding = coding_of(compress, feedback)
        if coding is None and asks_for_servers(algorithm):
            from pycoll.comm.served import without_servers

            if self._served is not None:
                return self._served.all_reduce(x, op, **words)
            if algorithm == PS:
                without_servers(self.size)
        if isinstance(x, list | tuple):
            from pycoll.comm.fused_batches import start_list

            work = start_list(
                self, x, op, out, algorithm, deterministic, stream, async_op, coding, feedback
            )
            return work if async_op else work.wait()
        ends = ends_of(x, out)
        return self._reduce_alike(
            Collective.ALL_REDUCE,
            x,
            ends,
            op,
            0,
            out,
            algorithm,
            async_op,
            deterministic,
            stream,
            coding,
            feedback,
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
        """Combine the arrays ``x`` of all ranks; only ``root`` gets the result.

        ``x``: an array with the same shape and dtype on all ranks. ``root``: the receiving rank,
        from 0 to size - 1, the same on all ranks. ``op``: the reduction (docs/reductions.md).
        ``out``: on the root as in all_reduce; on another rank it is checked but not written. The
        other arguments are those of all collectives, see Communicator.

        Returns on the root an array with the shape and dtype of x, or ``out``. Returns on another
        rank its ``out``, or None. With ``async_op`` returns a Work of that.

        Raises the errors of all collectives, see Communicator.

        Cost: for long messages every rank sends its n bytes about once; for short ones log2(size)
        steps. Algorithms: direct exchange, binomial tree, chain and double binary tree.

        >>> comm.reduce(np.ones(2), root=0)  # on 3 ranks; this is rank 0
        array([3., 3.])
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
        ends = Ends(framework, source, None, None)
        return self._run(prepared, ends, x, out, [source.count], async_op, stream)

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
        compress: Any = None,
        feedback: Any = None,
    ) -> Any:
        """Combine the arrays ``x`` of all ranks; every rank gets its rows of the result.

        ``x``: an array of at least one axis, with the same shape and dtype on all ranks. ``op``:
        the reduction (docs/reductions.md). ``splits``: one number of rows per rank, the same
        sequence on all ranks, with the sum ``len(x)``; rank r gets the next ``splits[r]`` rows.
        With None every rank gets ``len(x) // size`` rows, and the lowest ranks get one more each
        where size does not divide ``len(x)``. ``out``: memory apart from x. ``compress``,
        ``feedback``: as in all_reduce; each rank folds its rows in full
        precision, and they are not encoded again. The other arguments are those of all collectives,
        see Communicator.

        Returns this rank's rows, with the trailing dimensions and dtype of x, or ``out``; with
        ``async_op``, a Work of that.

        Raises the errors of all collectives, see Communicator.

        Cost: about n bytes sent per rank, where n is the size of x in bytes. Algorithms: ring,
        direct exchange and halving-doubling; see all_reduce for their sources.

        >>> comm.reduce_scatter(np.arange(4.0))  # on 2 ranks; this is rank 1
        array([4., 6.])
        """
        if runs_itself(compress):
            words = {"out": out, "feedback": feedback, "algorithm": algorithm, "stream": stream}
            return compress.reduce_scatter(self, x, op, splits, async_op=async_op, **words)
        coding = coding_of(compress, feedback)
        framework, source = input_of(x, out)
        need_axis(source.shape, "reduce_scatter")
        rows = split_rows(splits, source.shape[0], self.size)
        split_key = () if splits is None else (salt("splits"), *rows)
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
            (*split_key, *source.shape[1:]),
            coding,
        )
        prepared.check_shape(source.shape, 2)
        prepared = prepared.of_array(source.shape)
        ends = Ends(framework, source, memory, target)
        counts = elements(rows, source.shape)
        return self._run(prepared, ends, x, out, counts, async_op, stream, feedback=feedback)

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
        """Combine the arrays ``x`` of ranks 0 to this one, in rank order.

        ``x``: an array with the same shape and dtype on all ranks. ``op``: the reduction
        (docs/reductions.md), but not "avg". ``out``: as in all_reduce. The other arguments are
        those of all collectives, see Communicator.

        Returns an array with the shape and dtype of x, or ``out``; with ``async_op``, a Work of
        that.

        Raises the errors of all collectives, see Communicator.

        Cost: for short messages log2(size) steps. Source: Hillis and Steele 1986; for long
        messages a pipelined chain.

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
        """Combine the arrays ``x`` of the ranks below this one, in rank order.

        ``x``: an array with the same shape and dtype on all ranks. ``op``: the reduction
        (docs/reductions.md), but not "avg", "maxloc" or "minloc". ``out``: as in all_reduce. The
        other arguments are those of all collectives, see Communicator.

        Returns an array with the shape and dtype of x, or ``out``; with ``async_op``, a Work of
        that. Rank 0 gets the neutral element of op: 0 for sum, 1 for prod, the highest value of the
        type for min, the lowest for max, all bits for band. For an op from ``register_op`` it gets
        its ``identity``.

        Raises the errors of all collectives, see Communicator.

        Cost and source: as scan.

        >>> comm.exscan(1)  # on rank 2
        2
        """
        ends = ends_of(x, out)
        return self._reduce_alike(
            Collective.EXSCAN, x, ends, op, 0, out, algorithm, async_op, deterministic, stream
        )

    def _all_reduce_largest(
        self,
        codec: TopK,
        x: Any,
        op: Any,
        *,
        out: Any = None,
        async_op: bool = False,
        deterministic: bool | None = None,
        stream: Any = None,
        feedback: Any = None,
    ) -> Any:
        """Run the all_reduce of device arrays with a codec, whose density is that of this call."""
        from pycoll.comm.fused_batches import Member, members_of
        from pycoll.device.coded_calls import run_sparse

        is_list = isinstance(x, list | tuple)
        members = members_of(x, out) if is_list else [Member(x, out, ends_of(x, out))]
        for one in members:
            check_elements(Collective.ALL_REDUCE, one.ends.source.dtype, ReduceOp.SUM)

        def results() -> Any:
            made = [one.finisher()() for one in members]
            return made[0] if not is_list else made if out is None else out

        words = (op, deterministic)
        return run_sparse(self, members, codec, words, stream, results, async_op, feedback)

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
        coding: Coding | None = None,
        feedback: Any = None,
    ) -> Any:
        """Prepare and run a collective whose result has the shape of x."""
        source = ends.source
        prepared = self._prepare(
            collective,
            source.dtype,
            op,
            root,
            source.nbytes,
            algorithm,
            deterministic,
            coding=coding,
        )
        prepared.check_shape(source.shape)
        message, identity = None, b""
        if collective is Collective.ALL_REDUCE and not prepared.by_python:
            message = self._plans.message_key(prepared, algorithm, deterministic)
        if collective is Collective.EXSCAN and prepared.reduction is not None:
            identity = prepared.reduction.identity_bytes(source.dtype)
        return self._run(
            prepared.of_array(source.shape),
            ends,
            x,
            out,
            [source.count],
            async_op,
            stream,
            message,
            identity if self.rank == 0 else b"",
            feedback,
        )
