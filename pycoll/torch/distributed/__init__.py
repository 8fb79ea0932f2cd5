"""The backend "pycoll" of torch.distributed; registered by importing pycoll.torch.

``process_group`` translates torch's collectives, ``work`` its handles; ``joining`` makes groups
from the store that torch gives.
"""

from __future__ import annotations

from pycoll.torch.distributed.joining import register
from pycoll.torch.distributed.process_group import PycollProcessGroup

__all__ = ["PycollProcessGroup", "register"]
