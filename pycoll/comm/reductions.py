"""The collectives that combine values: all_reduce, reduce, reduce_scatter, scan, exscan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pycoll.arrays.registry import input_of, output_view
from pycoll.arrays.rows import elements, need_axis, split_rows, with_rows
from pycoll.comm.codecs import Coding, check_elements, coding_of, runs_itself
from pycoll.comm.operations import (
    PS,
    CallOptions,
    CallRunner,
    Ends,
    asks_for_servers,
    ends_of,
    result_memory,
    salt,
)
from pycoll.schedule.collectives import Collective
from pycoll.types import ReduceOp, check_rank

if TYPE_CHECKING:
    from pycoll.comm.served import Served
    from pycoll.compress.sparse import TopK


class Reductions:
    """Reads and checks the arguments of reducing collectives, and runs them.

    The methods have the promises of the communicator's. ``options``: the arguments that all
    collectives share. ``communicator``: codecs that run themselves call its collectives.
    ``served``: the servers of these ranks, if there are some.
    """

    def __init__(self, runner: CallRunner, served: Served | None) -> None:
        self._runner = runner
        self._compile = runner.compiler.compile
        self._served = served

    def all_reduce(
        self,
        communicator: Any,
        x: Any,
        op: Any,
        options: CallOptions,
        compress: Any = None,
        feedback: Any = None,
    ) -> Any:
        """Run ``Communicator.all_reduce``."""
        if runs_itself(compress):
            codec = compress.codec_on_devices(x, op, options.algorithm, feedback)
            if codec is not None:
                return self._run_sparse(codec, x, op, options, feedback)
            words = options._asdict()
            return compress.all_reduce(communicator, x, op, feedback=feedback, **words)
        coding = coding_of(compress, feedback)
        if coding is None and asks_for_servers(options.algorithm):
            from pycoll.comm.served import without_servers

            if self._served is not None:
                return self._served.all_reduce(x, op, options)
            if options.algorithm == PS:
                without_servers(self._runner.size)
        if isinstance(x, list | tuple):
            from pycoll.comm.fused_batches import start_list

            work = start_list(self._runner, x, op, options, coding, feedback)
            return work if options.async_op else work.wait()
        ends = ends_of(x, options.out)
        return self._run_alike(Collective.ALL_REDUCE, x, ends, op, 0, options, coding, feedback)

    def reduce(self, x: Any, root: int, op: Any, options: CallOptions) -> Any:
        """Run ``Communicator.reduce``."""
        runner, out = self._runner, options.out
        root = check_rank(root, "root", runner.size)
        if runner.rank == root:
            return self._run_alike(Collective.REDUCE, x, ends_of(x, out), op, root, options)
        framework, source = input_of(x, out)
        if out is not None:
            output_view(out, source.dtype, source.shape, source, True)
        ends = Ends(framework, source, None, None)
        return self._run_alike(Collective.REDUCE, x, ends, op, root, options)

    def reduce_scatter(
        self,
        communicator: Any,
        x: Any,
        op: Any,
        splits: Sequence[int] | None,
        options: CallOptions,
        compress: Any = None,
        feedback: Any = None,
    ) -> Any:
        """Run ``Communicator.reduce_scatter``."""
        runner = self._runner
        out, algorithm, async_op, deterministic, stream = options
        if runs_itself(compress):
            words = {"out": out, "feedback": feedback, "algorithm": algorithm, "stream": stream}
            return compress.reduce_scatter(communicator, x, op, splits, async_op=async_op, **words)
        coding = coding_of(compress, feedback)
        framework, source = input_of(x, out)
        need_axis(source.shape, "reduce_scatter")
        rows = split_rows(splits, source.shape[0], runner.size)
        split_key = () if splits is None else (salt("splits"), *rows)
        shape = with_rows(source.shape, rows[runner.rank])
        memory, target = result_memory(framework, x, source, shape, source.dtype, out)
        compiled = self._compile(
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
        compiled.check_shape(source.shape, 2)
        ends = Ends(framework, source, memory, target)
        counts = elements(rows, source.shape)
        compiled = compiled.of_array(source.shape)
        return runner.run(compiled, ends, x, options, counts, feedback=feedback)

    def scan(self, x: Any, op: Any, options: CallOptions) -> Any:
        """Run ``Communicator.scan``."""
        return self._run_alike(Collective.SCAN, x, ends_of(x, options.out), op, 0, options)

    def exscan(self, x: Any, op: Any, options: CallOptions) -> Any:
        """Run ``Communicator.exscan``."""
        return self._run_alike(Collective.EXSCAN, x, ends_of(x, options.out), op, 0, options)

    def _run_sparse(self, codec: TopK, x: Any, op: Any, options: CallOptions, feedback: Any) -> Any:
        """Run the all_reduce of device arrays with a codec, whose density is that of this call."""
        from pycoll.comm.fused_batches import Member, members_of
        from pycoll.device.coded_calls import run_sparse

        out, _, async_op, deterministic, stream = options
        is_list = isinstance(x, list | tuple)
        members = members_of(x, out) if is_list else [Member(x, out, ends_of(x, out))]
        for one in members:
            check_elements(Collective.ALL_REDUCE, one.ends.source.dtype, ReduceOp.SUM)

        def results() -> Any:
            made = [one.finisher()() for one in members]
            return made[0] if not is_list else made if out is None else out

        words = (op, deterministic)
        return run_sparse(self._runner, members, codec, words, stream, results, async_op, feedback)

    def _run_alike(
        self,
        collective: Collective,
        x: Any,
        ends: Ends,
        op: Any,
        root: int,
        options: CallOptions,
        coding: Coding | None = None,
        feedback: Any = None,
    ) -> Any:
        """Compile and run a collective whose blocks have the shape of x."""
        _, algorithm, _, deterministic, _ = options
        source = ends.source
        dtype, shape = source.dtype, source.shape
        compiled = self._compile(
            collective, dtype, op, root, source.nbytes, algorithm, deterministic, (), coding
        )
        compiled.check_shape(shape)
        message, identity = None, b""
        if collective is Collective.ALL_REDUCE and not compiled.by_python:
            plans = self._runner.compiler.plans
            message = plans.message_key(compiled, algorithm, deterministic)
        if collective is Collective.EXSCAN and compiled.reduction is not None:
            identity = compiled.reduction.identity_bytes(dtype)  # may raise, then on all ranks
            identity = identity if self._runner.rank == 0 else b""
        return self._runner.run(
            compiled.of_array(shape), ends, x, options, [source.count], message, identity, feedback
        )
