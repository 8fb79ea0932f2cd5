"""Names of other libraries and pycoll's names for them: calls, reductions, element types, options.

Errors about an unknown name append the text that a function of this module returns; it returns ""
for an unknown name. The names are those of mpi4py, torch.distributed, Horovod, NCCL and
nccl-tests, NumPy and JAX.
"""

from __future__ import annotations

import sys
from collections.abc import Container
from typing import Any

#: pycoll's call, then the names that other libraries have for it.
_CALLS = """
all_reduce|allreduce Allreduce AllReduce all_reduce_coalesced grouped_allreduce psum
all_reduce(..., async_op=True)|Iallreduce iallreduce allreduce_async
all_reduce(x, out=x)|allreduce_ all_reduce_
reduce|Reduce
broadcast|bcast Bcast Broadcast broadcast_
broadcast(..., async_op=True)|Ibcast ibcast broadcast_async
broadcast_object|broadcast_object_list
all_gather|allgather Allgather Allgatherv AllGather all_gather_into_tensor
all_gather(..., async_op=True)|Iallgather Iallgatherv allgather_async
all_gather_object|allgather_object
gather|Gather Gatherv
gather_object|gather_object_list
scatter|Scatter Scatterv
scatter_object|scatter_object_list
reduce_scatter|reducescatter Reduce_scatter Reduce_scatter_block reduce_scatter_tensor ReduceScatter
all_to_all|alltoall Alltoall Alltoallv all_to_all_single AllToAll
all_to_all(..., async_op=True)|Ialltoall Ialltoallv alltoall_async
scan|Scan
exscan|Exscan
barrier|Barrier
barrier(async_op=True)|Ibarrier ibarrier
send|Send ssend Ssend bsend Bsend rsend Rsend
recv|Recv receive
isend|Isend issend Issend
irecv|Irecv
irecv_any|irecv_anysource recv_any
sendrecv|Sendrecv
probe|Probe mprobe
iprobe|Iprobe improbe
group|batch_isend_irecv groupStart group_start
split|Split new_group split_group Create Create_group
dup|Dup Clone clone
abort|Abort
wait_all|Waitall waitall wait_for_all
rank|Get_rank get_rank
size|Get_size get_size get_world_size world_size
init|init_process_group Init
finalize|destroy_process_group shutdown Finalize
is_initialized|Is_initialized
close|Free Disconnect
world()|COMM_WORLD
Work|Request
a word, as in op='sum'|ReduceOp Op SUM MAX MIN PROD Sum Average Min Max
"""
CALLS = {
    name: here
    for line in _CALLS.strip().splitlines()
    for here, names in [line.split("|")]
    for name in names.split()
}

_OPS = {
    **dict.fromkeys(("add", "total", "plus", "sum", "fsum", "psum"), "sum"),
    **dict.fromkeys(("multiply", "mul", "product", "prod"), "prod"),
    **dict.fromkeys(("minimum", "amin", "fmin", "min", "pmin"), "min"),
    **dict.fromkeys(("maximum", "amax", "fmax", "max", "pmax"), "max"),
    **dict.fromkeys(("mean", "average", "avg", "nanmean", "pmean"), "avg"),
    **dict.fromkeys(("bitwise_and", "and_", "band"), "band"),
    **dict.fromkeys(("bitwise_or", "or_", "bor"), "bor"),
    **dict.fromkeys(("bitwise_xor", "xor", "bxor"), "bxor"),
    **dict.fromkeys(("logical_and", "land", "all"), "land"),
    **dict.fromkeys(("logical_or", "lor", "any"), "lor"),
    **dict.fromkeys(("logical_xor", "lxor"), "lxor"),
    **dict.fromkeys(("argmax", "maxloc"), "maxloc"),
    **dict.fromkeys(("argmin", "minloc"), "minloc"),
}

_DTYPES = {
    "float": "float32 (NumPy's float is float64)",
    "single": "float32",
    "double": "float64",
    "half": "float16",
    "bfloat": "bfloat16",
    "char": "int8",
    "short": "int16",
    "int": "int32 (NumPy's int is int64)",
    "long": "int64",
    "uint": "uint32",
    "cfloat": "complex64",
    "cdouble": "complex128",
    "fp8_e4m3": "float8_e4m3",
    "fp8_e5m2": "float8_e5m2",
    **{f"{kind}{bits}": f"{word}{bits}" for kind, word in (("fp", "float"), ("f", "float"))
       for bits in (16, 32, 64)},
    "bf16": "bfloat16",
}  # fmt: skip

#: Names for local updates in torch, torchft, fairscale, Hivemind and OpenDiLoCo.
_OPTIMIZERS = {
    **dict.fromkeys(
        ("PostLocalSGDOptimizer", "PostLocalSGDState", "post_localSGD_hook"),
        "LocalSGD(optimizer, every=PostLocal(start, every))",
    ),
    **dict.fromkeys(
        ("PeriodicModelAverager", "HierarchicalModelAverager", "average_parameters"),
        "LocalSGD(optimizer, every), or LocalUpdates for arrays without an optimizer",
    ),
    **dict.fromkeys(
        ("DiLoCoOptimizer", "Diloco", "StreamingDiLoCo"),
        "DiLoCo(optimizer, every, fragments=, delay=)",
    ),
    **dict.fromkeys(
        ("SlowMoOptimizer", "SlowMoDistributedDataParallel"), "SlowMo(optimizer, every)"
    ),
    "DistributedOptimizer": "pycoll.torch.DistributedOptimizer",
}

_RANKS = "the number of ranks is -n N"
_OPTIONS = {
    "--host": "the hosts are -H host:slots,host:slots or --hostfile FILE",
    "--machinefile": "the file of the hosts is --hostfile FILE",
    **dict.fromkeys(
        ("--np", "--num-proc", "-c", "--nproc-per-node", "--nproc_per_node", "--ntasks"), _RANKS
    ),
    "--node_rank": "the number of this node is --node-rank N",
    **dict.fromkeys(
        ("--master-addr", "--master_addr", "--rdzv-endpoint", "--rdzv_endpoint"),
        "the place where nodes meet is --address HOST:PORT",
    ),
}
#: Options of nccl-tests that ``pycoll bench`` does not have, or uses with another meaning.
_BENCH_OPTIONS = {
    "-g": f"a rank has one device, which --device cuda takes; {_RANKS}",
    "--ngpus": f"a rank has one device, which --device cuda takes; {_RANKS}",
    "-t": f"ranks are processes; {_RANKS}",
    "--nthreads": f"ranks are processes; {_RANKS}",
    "-d": "the element type is --dtype WORD",
    "--datatype": "the element type is --dtype WORD",
    "-o": "the reduction is --op WORD",
    "-r": "the root is --root RANK",
    "-i": "sizes grow by a factor, -f N",
    "--minbytes": "the first size is -b SIZE",
    "--maxbytes": "the last size is -e SIZE",
    "--stepfactor": "the factor between sizes is -f N",
    "--iters": "the number of samples is --samples N",
    "-w": "each size warms up by itself",
    "--warmup_iters": "each size warms up by itself",
    "-c": "results are compared unless --no-check is given",
    "-G": "operations are replayed from a captured graph by --graph",
}


def about_call(name: str) -> str:
    """Return the hint for a call: ``": pycoll calls it all_reduce"`` for ``"Allreduce"``."""
    here = CALLS.get(name)
    return f": pycoll calls it {here}" if here else ""


def about_op(op: Any, known: Container[str]) -> str:
    """Return the hint for a reduction.

    It is ``" (pycoll calls it 'avg')"`` for ``"mean"``, ``np.mean`` and torch's ``ReduceOp.AVG``.
    ``known``: the names of the existing reductions.
    """
    name = op if isinstance(op, str) else getattr(op, "__name__", None) or _name_of_mpi(op)
    here = _OPS.get(str(name).rpartition(".")[2].lower())
    return f" (pycoll calls it {here!r})" if here in known and here != op else ""


def _name_of_mpi(op: Any) -> str:
    """Return the name of an mpi4py operation. The operation has no name, but its module has."""
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and isinstance(op, mpi.Op):
        return next((word for word in _OPS if getattr(mpi, word.upper(), None) == op), "")
    return str(op)


def about_dtype(word: Any) -> str:
    """Return the hint for an element type: ``" (pycoll calls it float64)"`` for ``"double"``."""
    here = _DTYPES.get(word) if isinstance(word, str) else None
    return f" (pycoll calls it {here})" if here else ""


def about_optimizer(name: str) -> str:
    """Return the hint for an optimizer: ``": pycoll has LocalSGD(...) for it"``, or ""."""
    here = _OPTIMIZERS.get(name)
    return f": pycoll has {here} for it" if here else ""


def about_option(command: str, word: str) -> str:
    """Return the advice for an option of another launcher or benchmark, or "".

    ``command``: "run" or "bench".
    """
    table = {"bench": _BENCH_OPTIONS, "run": _OPTIONS}.get(command, {})
    name = word.partition("=")[0]
    short = name if name.startswith("--") or name in table else name[:2]
    return table.get(short, "")


class ForeignCall:
    """A class attribute under another library's name.

    Access to it raises an AttributeError that tells pycoll's name. A ``__getattr__`` would keep the
    interpreter from caching the lookup of methods.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, instance: object, owner: type) -> Any:
        raise AttributeError(
            f"{owner.__name__!r} object has no attribute {self.name!r}{about_call(self.name)}",
            name=self.name,
            obj=owner if instance is None else instance,
        )


def refuse_foreign_calls(owner: type) -> None:
    """Give ``owner`` a ForeignCall for each name in ``CALLS`` that it does not have."""
    for name in CALLS:
        if not hasattr(owner, name):
            setattr(owner, name, ForeignCall(name))
