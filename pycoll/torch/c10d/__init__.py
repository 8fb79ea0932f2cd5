"""The backend "pycoll" of torch.distributed; importing pycoll.torch registers it.

group_setup      makes process groups from the store of torch
process_group    translates the collectives of torch; ``membership`` is its base class
reconfiguration  process groups whose members change, from torch 2.14 on
group_work       translates handles (Work); ``watcher`` completes their futures
"""

from __future__ import annotations

from pycoll.torch.c10d.group_setup import register
from pycoll.torch.c10d.process_group import PycollProcessGroup

__all__ = ["PycollProcessGroup", "register"]
