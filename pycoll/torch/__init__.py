"""pycoll for torch: Horovod's interface, and a backend for torch.distributed.

    import pycoll.torch as hvd          import pycoll.torch
    hvd.init()                          torch.distributed.init_process_group("pycoll")

``world`` says who takes part, ``reducing`` and ``moving`` have the operations, ``optimizer`` the
DistributedOptimizer, ``agreement`` how ranks agree on the order of tensors, ``distributed`` is the
backend. torch itself is needed only here.
"""

from __future__ import annotations

try:
    import torch as _torch
except ImportError as _error:
    raise ImportError(f"pycoll.torch needs PyTorch, which cannot be imported: {_error}") from _error
if not hasattr(_torch, "Tensor"):
    # Any folder of that name on the path can be imported where PyTorch is missing.
    raise ImportError(f"pycoll.torch needs PyTorch; what is found as torch is {_torch!r}")

from pycoll.torch import elastic, functions, mpi_ops
from pycoll.torch.builds import (
    ccl_built,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rocm_built,
)
from pycoll.torch.compression import Compression
from pycoll.torch.distributed import register as _register
from pycoll.torch.errors import HorovodInternalError
from pycoll.torch.handles import poll, synchronize
from pycoll.torch.moving import (
    allgather,
    allgather_async,
    alltoall,
    alltoall_async,
    barrier,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    grouped_allgather,
    grouped_allgather_async,
    join,
)
from pycoll.torch.objects import allgather_object, broadcast_object
from pycoll.torch.ops import Adasum, Average, Max, Min, Product, Sum
from pycoll.torch.optimizer import DistributedOptimizer
from pycoll.torch.process_sets import (
    ProcessSet,
    add_process_set,
    global_process_set,
    remove_process_set,
)
from pycoll.torch.reducing import (
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    grouped_reducescatter,
    grouped_reducescatter_async,
    reducescatter,
    reducescatter_async,
)
from pycoll.torch.sparse import sparse_allreduce_async
from pycoll.torch.state import broadcast_optimizer_state, broadcast_parameters
from pycoll.torch.sync_batch_norm import SyncBatchNorm
from pycoll.torch.world import (
    cross_rank,
    cross_size,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    rank,
    shutdown,
    size,
    start_timeline,
    stop_timeline,
)

_register()

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedOptimizer",
    "HorovodInternalError",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "SyncBatchNorm",
    "add_process_set",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "elastic",
    "functions",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_ops",
    "mpi_threads_supported",
    "nccl_built",
    "poll",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "sparse_allreduce_async",
    "start_timeline",
    "stop_timeline",
    "synchronize",
]
