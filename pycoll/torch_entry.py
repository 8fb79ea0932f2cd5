"""The entry point ``torch.backends``: ``import torch`` calls ``register`` in every process.

Therefore ``dist.init_process_group("pycoll")`` works in programs that never import pycoll. The
module imports nothing of pycoll until torch makes a group. With TORCH_DEVICE_BACKEND_AUTOLOAD=0
torch reads no entry points; ``import pycoll.torch`` registers the backend then.
"""

from __future__ import annotations

import contextlib
import importlib
import warnings
from typing import Any

#: The backend's name, as ``pycoll.torch.c10d`` has it; that module is imported later.
_NAME = "pycoll"


def register() -> None:
    """Register the backend "pycoll" with torch.distributed. Does nothing the second time.

    ``torch`` must be imported. Never raises, since an exception would end ``import torch``: a torch
    that refuses the backend causes a warning. Cost: less than a millisecond.

    >>> import torch.distributed as dist
    >>> register()
    >>> dist.Backend("pycoll")
    'pycoll'
    """
    try:
        distributed = importlib.import_module("torch.distributed")
        if not distributed.is_available():
            return
        backend = distributed.Backend
        if _NAME not in backend.backend_list:
            backend.register_backend(_NAME, _make, extended_api=True, devices=["cpu", "cuda"])
    except Exception as error:
        # Where warnings are errors, the program continues without the backend.
        with contextlib.suppress(Warning):
            warnings.warn(
                f"the backend {_NAME!r} of torch.distributed is missing: {error!r}; "
                "import pycoll.torch shows the error",
                stacklevel=2,
            )


def _make(options: Any, backend_options: Any) -> Any:
    """Make a process group; torch calls this on all members of a new group."""
    from pycoll.torch.c10d.group_setup import make_group

    return make_group(options, backend_options)
