"""Making a process group: the ranks meet at torch's store, then connect as pycoll does."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from pycoll import tuning
from pycoll.bootstrap import Joined
from pycoll.bootstrap.connect import connect
from pycoll.bootstrap.deadline import Deadline
from pycoll.bootstrap.exchange import Exchange, SoloExchange
from pycoll.bootstrap.limits import check_alone
from pycoll.bootstrap.torch_store import TorchStoreExchange
from pycoll.communicator import Communicator
from pycoll.config import Config
from pycoll.torch.distributed.membership import NAME, Origin
from pycoll.torch.distributed.process_group import PycollProcessGroup


def register() -> None:
    """Tell torch.distributed of the backend, once; without torch.distributed there is none."""
    if dist.is_available() and NAME.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(NAME, _make, extended_api=True, devices=["cpu", "cuda"])


def _make(options: Any, backend_options: Any) -> PycollProcessGroup:
    """What torch calls in init_process_group and new_group, on every member."""
    if backend_options is not None:
        raise ValueError(f"pg_options is {backend_options!r}: the backend pycoll has no options")
    seconds = options.timeout.total_seconds()
    rank, size = options.group_rank, options.group_size
    config = Config.read()._replace(timeout_s=seconds)
    deadline = Deadline(seconds)
    exchange: Exchange = SoloExchange()
    if size > 1:
        check_alone(rank, size, config, serves=False, together=False)
        exchange = TorchStoreExchange(options.store, rank, size, deadline)
    name = f"torch/{options.group_id}"
    try:
        connected = connect(
            exchange, config, communicator_id=name, deadline=deadline, bring=tuning.text_of
        )
    except BaseException:
        exchange.abandon()
        raise
    exchange.close()
    joined = Joined(rank, size, *connected, source="torch.distributed")
    ranks = list(options.global_ranks_in_group)
    origin = Origin(options.store, options.timeout, options.group_id, ranks)
    return PycollProcessGroup(Communicator(joined, config, name), origin)
