"""pycoll for torch: the interface of Horovod, and a backend for torch.distributed.

    import pycoll.torch as hvd          import pycoll.torch
    hvd.init()                          torch.distributed.init_process_group("pycoll")

    horovod      the operations of Horovod, its world, and the negotiation of the tensor order
    optimizer    DistributedOptimizer; its parts are in ``optimizers``
    elastic      elastic states and samplers
    c10d         the backend of torch.distributed
    memory       the features that reach into torch: shared storages, deferred steps

Only this package needs torch.
"""

from __future__ import annotations

try:
    import torch as _torch
except ImportError as _error:
    raise ImportError(f"pycoll.torch needs PyTorch, which cannot be imported: {_error}") from _error
if not hasattr(_torch, "Tensor"):
    # Where PyTorch is missing, Python imports any folder named torch on its path as a namespace.
    raise ImportError(f"pycoll.torch needs PyTorch; the import of torch found {_torch!r}")

from pycoll.torch import elastic, functions, mpi_ops
from pycoll.torch.c10d import register as _register
from pycoll.torch.functions import *  # noqa: F403
from pycoll.torch.mpi_ops import *  # noqa: F403
from pycoll.torch.optimizer import DistributedOptimizer
from pycoll.torch.sync_batch_norm import SyncBatchNorm

_register()

__all__ = ["DistributedOptimizer", "SyncBatchNorm", "elastic", "functions", "mpi_ops"]
__all__ += functions.__all__
__all__ += mpi_ops.__all__
