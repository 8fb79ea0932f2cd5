"""Make a process group: the ranks exchange addresses over the store of torch, then connect."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from pycoll.bootstrap import Joined
from pycoll.bootstrap.deadline import Deadline
from pycoll.bootstrap.discovery.limits import check_alone
from pycoll.bootstrap.joining import connect_and_close
from pycoll.bootstrap.rendezvous.exchange import Exchange, SoloExchange
from pycoll.bootstrap.rendezvous.torch_store import TorchStoreExchange
from pycoll.comm.communicator import Communicator
from pycoll.comm.start_tuning import tuning_text
from pycoll.config import Config
from pycoll.torch.c10d.other_backends import NAME, Origin
from pycoll.torch.c10d.process_group import PycollProcessGroup
from pycoll.torch.c10d.reconfiguration import ReconfigurableGroup


def register() -> None:
    """Register the backend with torch.distributed, once; do nothing where that is not available."""
    if dist.is_available() and NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, make_group, extended_api=True, devices=["cpu", "cuda"])


def make_group(options: Any, backend_options: Any) -> PycollProcessGroup:
    """Make a process group; torch calls this on all members of a new group."""
    if backend_options is not None:
        raise ValueError(f"pg_options is {backend_options!r}: the backend pycoll has no options")
    seconds = options.timeout.total_seconds()
    rank, size = options.group_rank, options.group_size
    config = Config.read()._replace(timeout_s=seconds)
    ranks = list(options.global_ranks_in_group)
    origin = Origin(options.store, options.timeout, options.group_id, ranks)
    # torch 2.13 has no such option.
    if getattr(options, "enable_reconfigure", False):
        return ReconfigurableGroup(rank, size, config, origin)
    deadline = Deadline(seconds)
    exchange: Exchange = SoloExchange()
    if size > 1:
        check_alone(rank, size, config, serves=False, together=False)
        exchange = TorchStoreExchange(options.store, rank, size, deadline)
    name = f"torch/{options.group_id}"
    connected = connect_and_close(exchange, config, name, deadline, bring=tuning_text)
    joined = Joined(rank, size, *connected, source="torch.distributed")
    return PycollProcessGroup(Communicator(joined, config, name), origin)
