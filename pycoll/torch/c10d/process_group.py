"""The collectives of torch.distributed, implemented with those of pycoll."""

from __future__ import annotations

import atexit
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from pycoll.comm.work import Work
from pycoll.torch.c10d.group_work import Pending, completed_handle, pending, translate_error
from pycoll.torch.c10d.membership import Membership, by_device, close_all
from pycoll.torch.c10d.shapes import (
    Finish,
    Tensors,
    apart,
    dealt,
    ends_for,
    flat,
    one_axis,
    only,
    same_type,
    solid,
    together,
    word_of,
    writable,
)
from pycoll.torch.c10d.sparse_sums import reduce_sparse
from pycoll.torch.c10d.splits import is_uniform


class PycollProcessGroup(Membership):
    """A process group over a communicator of pycoll, which it owns.

    torch.distributed and the C++ parts of torch call the methods, with tensors in host memory or on
    CUDA devices. Each method returns a Pending at once. Coalesced and sparse all-reduces are an
    exception: they have run when the method returns (on a device: are in the current stream).

    Methods raise ValueError for tensors that do not fit together, before any data moves. Works
    raise DistBackendError for lost ranks, mismatches and deadlines.
    """

    # Reductions

    @by_device
    def allreduce(self, tensors: Tensors, opts: Any = None) -> Pending:
        """Reduce the tensors of all ranks in place."""
        tensor = only(tensors, "tensors")
        op = _op(opts)
        if tensor.is_sparse:
            reduce_sparse(self.communicator, tensor, word_of(op))
            return completed_handle(list(tensors), self._watcher)
        target, back = writable(tensor)
        if back is None and self._storages is not None:
            self._storages.move_gradient(target)
        target = one_axis(target)
        ends = ends_for(op, target, target, back)
        works = [self._call("all_reduce", ends.source, word_of(op), out=ends.target)]
        return self._pending(works, [tensor], ends.back)

    @by_device
    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> Pending:
        """Reduce several tensors in place, as one group."""
        op = _op(opts)
        backs: list[Finish | None] = []
        try:
            with self.communicator.group():
                for tensor in tensors:
                    target, back = writable(tensor)
                    target = one_axis(target)
                    ends = ends_for(op, target, target, back)
                    self.communicator.all_reduce(ends.source, word_of(op), out=ends.target)
                    backs.append(ends.back)
        except Exception as error:
            raise translate_error(error) from error
        done = together(*backs)
        if done is not None:
            done()
        return completed_handle(list(tensors), self._watcher)

    @by_device
    def reduce(self, tensors: Tensors, opts: Any) -> Pending:
        """Reduce the tensors of all ranks in place on the root; other ranks keep theirs."""
        tensor, root = only(tensors, "tensors"), opts.rootRank
        op, word = opts.reduceOp, word_of(opts.reduceOp)
        if self.rank() != root:
            piece = flat(tensor)
            works = [self._call("reduce", ends_for(op, piece, piece, None).source, root, word)]
            return self._pending(works, [tensor])
        target, back = writable(tensor)
        piece = target.view(-1)
        ends = ends_for(op, piece, piece, back)
        works = [self._call("reduce", ends.source, root, word, out=ends.target)]
        return self._pending(works, [tensor], ends.back)

    @by_device
    def reduce_scatter(
        self, output_tensors: Tensors, input_tensors: Sequence[Tensors], opts: Any = None
    ) -> Pending:
        """Reduce the r-th inputs of all ranks into the output of rank r; sizes may differ by r."""
        output, inputs = only(output_tensors, "output_tensors"), input_tensors[0]
        same_type(inputs, output, "input_tensors")
        if len(inputs) != self.size():
            raise ValueError(f"{len(inputs)} input tensors for {self.size()} ranks")
        word = word_of(_op(opts))
        target, back = writable(output)
        every = [ends_for(_op(opts), flat(one), target.view(-1), back) for one in inputs]
        pieces = [apart(one.source, target) for one in every]
        mine = every[self.rank()]
        if len({len(one) for one in pieces}) == 1:
            works = [self._call("reduce_scatter", torch.cat(pieces), word, out=mine.target)]
        else:
            works = [
                self._call("reduce", piece, rank, word, out=mine.target)
                if rank == self.rank()
                else self._call("reduce", piece, rank, word)
                for rank, piece in enumerate(pieces)
            ]
        return self._pending(works, [output], mine.back)

    @by_device
    def reduce_scatter_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: Any = None
    ) -> Pending:
        """Reduce the inputs of all ranks; the output is this rank's equal share."""
        self._check_shares(input, output, "input", "output")
        target, back = writable(output)
        op = _op(opts)
        ends = ends_for(op, flat(input), target.view(-1), back)
        source = apart(ends.source, target)
        works = [self._call("reduce_scatter", source, word_of(op), out=ends.target)]
        return self._pending(works, [output], ends.back)

    @by_device
    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> Pending:
        """Run reduce_scatter_single for several pairs."""
        return self._all_of(
            [self.reduce_scatter_single(o, i, opts) for o, i in zip(outputs, inputs, strict=True)]
        )

    # Moving

    @by_device
    def broadcast(self, tensors: Tensors, opts: Any) -> Pending:
        """Copy the tensor of the root to all ranks, in place."""
        tensor = tensors[opts.rootTensor]
        target, back = writable(tensor)
        target = one_axis(target)
        works = [self._call("broadcast", target, opts.rootRank, out=target)]
        return self._pending(works, [tensor], back)

    @by_device
    def allgather(
        self, output_tensors: Sequence[Tensors], input_tensors: Tensors, opts: Any = None
    ) -> Pending:
        """Gather the inputs of all ranks, one output for each; sizes may differ between ranks."""
        outputs, given = output_tensors[0], only(input_tensors, "input_tensors")
        same_type(outputs, given, "output_tensors")
        lengths = self._lengths(outputs, given)
        piece = given.new_empty(sum(lengths))
        works = [self._call("all_gather", flat(given), lengths=lengths, out=piece)]
        return self._pending(works, list(outputs), dealt(piece, outputs))

    @by_device
    def allgather_coalesced(
        self, output_lists: Sequence[Tensors], input_list: Tensors, opts: Any = None
    ) -> Pending:
        """Run allgather for several inputs; ``output_lists`` has a list of outputs per rank."""
        return self._all_of(
            [
                self.allgather([[outputs[number] for outputs in output_lists]], [given], opts)
                for number, given in enumerate(input_list)
            ]
        )

    @by_device
    def all_gather_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: Any = None
    ) -> Pending:
        """Gather the inputs of all ranks in one output."""
        self._check_shares(output, input, "output", "input")
        target, back = writable(output)
        lengths = [input.numel()] * self.size()
        source = apart(flat(input), target)
        works = [self._call("all_gather", source, lengths=lengths, out=target.view(-1))]
        return self._pending(works, [output], back)

    @by_device
    def all_gather_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> Pending:
        """Run all_gather_single for several pairs."""
        return self._all_of(
            [self.all_gather_single(o, i, opts) for o, i in zip(outputs, inputs, strict=True)]
        )

    @by_device
    def gather(
        self, output_tensors: Sequence[Tensors], input_tensors: Tensors, opts: Any
    ) -> Pending:
        """Gather the inputs of all ranks, of equal size, on the root: one output for each."""
        given, root = only(input_tensors, "input_tensors"), opts.rootRank
        lengths = [given.numel()] * self.size()
        if self.rank() != root:
            return self._pending([self._call("gather", flat(given), root, lengths=lengths)], [])
        outputs = output_tensors[0]
        same_type(outputs, given, "output_tensors")
        if self._lengths(outputs, given) != lengths:
            raise ValueError(f"outputs of a gather must all have {given.numel()} elements")
        piece = given.new_empty(sum(lengths))
        works = [self._call("gather", flat(given), root, lengths=lengths, out=piece)]
        return self._pending(works, list(outputs), dealt(piece, outputs))

    @by_device
    def scatter(
        self, output_tensors: Tensors, input_tensors: Sequence[Tensors], opts: Any
    ) -> Pending:
        """Send the r-th input of the root to rank r; all inputs have equal size."""
        output, root = only(output_tensors, "output_tensors"), opts.rootRank
        target, back = writable(output)
        source: torch.Tensor = target.view(-1)
        if self.rank() == root:
            inputs = input_tensors[0]
            same_type(inputs, output, "input_tensors")
            if [one.numel() for one in inputs] != [output.numel()] * self.size():
                raise ValueError(
                    f"scatter to {self.size()} ranks needs that many inputs of {output.numel()} "
                    f"elements; it got {[one.numel() for one in inputs]}"
                )
            source = torch.cat([flat(one) for one in inputs])
        works = [self._call("scatter", source, root, out=target.view(-1))]
        return self._pending(works, [output], back)

    @by_device
    def alltoall(
        self, output_tensors: Tensors, input_tensors: Tensors, opts: Any = None
    ) -> Pending:
        """Send the r-th input to rank r, receive the r-th output from it; sizes may differ."""
        like = output_tensors[0]
        same_type([*input_tensors, *output_tensors], like, "tensors")
        if len(input_tensors) != self.size() or len(output_tensors) != self.size():
            raise ValueError(
                f"{len(input_tensors)} inputs and {len(output_tensors)} outputs for "
                f"{self.size()} ranks"
            )
        piece = like.new_empty(sum(one.numel() for one in output_tensors))
        source = torch.cat([flat(one) for one in input_tensors])
        splits = [one.numel() for one in input_tensors]
        wanted = [one.numel() for one in output_tensors]
        works = [self._exchange(source, splits, wanted, piece)]
        return self._pending(works, list(output_tensors), dealt(piece, output_tensors))

    @by_device
    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int],
        opts: Any = None,
    ) -> Pending:
        """Exchange rows with every rank, as many as the split sizes say, by default equally many.

        Either all ranks pass split sizes or none does. With split sizes, ranks exchange them before
        this method returns. All ranks raise ValueError where a rank sends another number of rows
        than the receiver expects. Without split sizes, ranks skip this exchange, which makes short
        messages much faster.
        """
        same_type([output], input, "output")
        target, back = writable(output)
        source = apart(solid(input), target)
        if output.shape[1:] != input.shape[1:] or not output.dim():
            raise ValueError(
                f"output has shape {tuple(output.shape)}, whose rows are not those of input, "
                f"{tuple(input.shape)}"
            )
        if not output_split_sizes and not input_split_sizes:
            works = [self._call("all_to_all", source, out=target)]
            return self._pending(works, [output], back)
        splits = list(input_split_sizes) or self._equal_splits(input)
        wanted = list(output_split_sizes) or self._equal_splits(output)
        return self._pending([self._exchange(source, splits, wanted, target)], [output], back)

    def barrier(self, opts: Any = None) -> Pending:
        """Wait until every rank has called; on a device also for the work of the current stream."""
        device = None if opts is None else opts.device
        if device is not None and device.type != "cpu":
            other = self.backend_for(device.type)
            if other is not None:
                return other.barrier(opts)  # type: ignore[no-any-return]  # a Work of that backend
            torch.cuda.current_stream(device).synchronize()
        return self._pending([self._call("barrier")], [])

    # Messages

    @by_device
    def send(self, tensors: Tensors, dst: int, tag: int) -> Pending:
        """Send a tensor to a rank of the group, as bytes.

        A receiver may pass a tensor of another dtype and equal length in bytes: it then reads the
        bytes as that dtype, without an error.
        """
        tensor = only(tensors, "tensors")
        works = [self._message("isend", solid(tensor), dst, tag)]
        return self._pending(works, [tensor])

    @by_device
    def recv(self, tensors: Tensors, src: int, tag: int) -> Pending:
        """Receive a tensor from a rank of the group, in place."""
        tensor = only(tensors, "tensors")
        target, back = writable(tensor)
        works = [self._message("irecv", target, src, tag)]
        return pending(works, [tensor], self._watcher, back, src)

    @by_device
    def recv_anysource(self, tensors: Tensors, tag: int) -> Pending:
        """Receive a tensor in place from the rank that sends first; host memory only."""
        tensor = only(tensors, "tensors")
        target, back = writable(tensor)
        return self._pending([self._message("irecv_any", target, tag)], [tensor], back)

    # Shared parts

    def _call(self, name: str, *args: Any, **words: Any) -> Work:
        """Start an operation of the communicator."""
        try:
            work: Work = getattr(self.communicator, name)(*args, async_op=True, **words)
        except Exception as error:
            raise translate_error(error) from error
        return work

    def _message(self, name: str, *args: Any) -> Work:
        try:
            work: Work = getattr(self.communicator, name)(*args)
        except Exception as error:
            raise translate_error(error) from error
        return work

    def _pending(
        self, works: list[Work], outputs: list[torch.Tensor], finish: Finish | None = None
    ) -> Pending:
        return pending(works, outputs, self._watcher, finish)

    def _all_of(self, parts: list[Pending]) -> Pending:
        """One handle for several operations."""
        outputs = [one for part in parts for one in part.result()]

        def finish() -> None:
            for part in parts:
                part.wait()

        works = [work for part in parts for work in part.parts()]
        return pending(works, outputs, self._watcher, finish)

    def _check_shares(
        self, whole: torch.Tensor, share: torch.Tensor, whole_name: str, share_name: str
    ) -> None:
        same_type([whole], share, whole_name)
        if whole.numel() != share.numel() * self.size():
            raise ValueError(
                f"{whole_name} has {whole.numel()} elements: expected {self.size()} times the "
                f"{share.numel()} of {share_name}"
            )

    def _lengths(self, outputs: Tensors, given: torch.Tensor) -> list[int]:
        lengths = [one.numel() for one in outputs]
        if len(lengths) != self.size():
            raise ValueError(f"{len(lengths)} output tensors for {self.size()} ranks")
        if lengths[self.rank()] != given.numel():
            raise ValueError(
                f"output {self.rank()} has {lengths[self.rank()]} elements, but the input of this "
                f"rank has {given.numel()}"
            )
        return lengths

    def _exchange(
        self, source: torch.Tensor, splits: list[int], wanted: list[int], target: torch.Tensor
    ) -> Work:
        """Check the split sizes with all ranks, then start an all_to_all."""
        rows, capacity = source.shape[0], target.shape[0]
        try:
            if is_uniform(self.communicator, splits, wanted, rows, capacity):
                return self._call("all_to_all", source, out=target)
        except Exception as error:
            raise translate_error(error) from error
        return self._call("all_to_all", source, splits, out=target)

    def _equal_splits(self, tensor: torch.Tensor) -> list[int]:
        if tensor.shape[0] % self.size():
            raise ValueError(
                f"{tensor.shape[0]} rows cannot be shared equally by {self.size()} ranks: pass "
                "split sizes"
            )
        return [tensor.shape[0] // self.size()] * self.size()

    # The names of these methods in other versions of torch.

    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced


def _op(opts: Any) -> Any:
    return dist.ReduceOp.SUM if opts is None else opts.reduceOp


atexit.register(close_all)
