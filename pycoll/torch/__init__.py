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
from pycoll.torch.distributed import register as _register
from pycoll.torch.functions import *  # noqa: F403
from pycoll.torch.mpi_ops import *  # noqa: F403
from pycoll.torch.optimizer import DistributedOptimizer
from pycoll.torch.sync_batch_norm import SyncBatchNorm

_register()

__all__ = ["DistributedOptimizer", "SyncBatchNorm", "elastic", "functions", "mpi_ops"]
__all__ += functions.__all__
__all__ += mpi_ops.__all__
