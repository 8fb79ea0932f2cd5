"""Checks of what torch does with the states of models over a group; see c10d_training_checks,
which takes them in."""

from __future__ import annotations

import tempfile
import warnings

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoints
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType, fully_shard


def layer(value: float) -> nn.Linear:
    net = nn.Linear(4, 4).double()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.arange(float(parameter.numel())).view_as(parameter) + value)
    return net


def alike(found: nn.Module, wanted: nn.Module) -> bool:
    pairs = zip(found.state_dict().values(), wanted.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def check_devices_of_a_group() -> None:
    world = dist.group.WORLD
    assert world is not None
    named = distributed_c10d._world.pg_backend_config[world]
    kinds = ["cpu"] if named == "cpu:pycoll" else ["cpu", "cuda"]
    assert world._device_types == [torch.device(kind) for kind in kinds], named
    assert distributed_c10d._get_object_coll_device() == "cpu"
    part = world.split_group([dist.get_rank()])
    assert part._device_types == [torch.device("cpu")], "a group that torch does not know of"
    part.shutdown()


def check_checkpoints_are_saved_meanwhile() -> None:
    folder: list[object] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    state = {"net": layer(3.0).state_dict()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        checkpoints.async_save(state, checkpoint_id=folder[0]).result()
        other = layer(0.0)
        loaded = {"net": other.state_dict()}
        checkpoints.load(loaded, checkpoint_id=folder[0])
    other.load_state_dict(loaded["net"])
    assert alike(other, layer(3.0))


def check_one_rank_has_the_state_for_all() -> None:
    net = layer(0.0)
    fully_shard(net, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    state = layer(5.0).state_dict() if dist.get_rank() == 0 else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(net, state, options=options)
    for found, wanted in zip(net.parameters(), layer(5.0).parameters(), strict=True):
        assert torch.equal(found.full_tensor(), wanted)


def check_sharded_state_of_the_first_fsdp() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nets = [
            FullyShardedDataParallel(layer(v), device_id=torch.device("cpu")) for v in (7.0, 0.0)
        ]
        for net in nets:
            FullyShardedDataParallel.set_state_dict_type(net, StateDictType.SHARDED_STATE_DICT)
        nets[1].load_state_dict(nets[0].state_dict())
        with FullyShardedDataParallel.summon_full_params(nets[1]):
            assert alike(nets[1].module, layer(7.0))
