"""The names of horovod.torch, their parameters in order, and what programs ask about the build."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

import pycoll.torch as hvd
from pycoll import _core

REDUCE = "average name op prescale_factor postscale_factor process_set"
SQUEEZED = REDUCE.replace("name", "name compression")
SCATTER = "name op process_set prescale_factor postscale_factor"
#: As Horovod 0.28 has them.
PARAMETERS = {
    "init": "comm process_sets",
    "shutdown": "",
    "is_initialized": "",
    "start_timeline": "file_path mark_cycles",
    "stop_timeline": "",
    **dict.fromkeys(
        ("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size", "is_homogeneous"),
        "",
    ),
    **dict.fromkeys(("allreduce_", "allreduce_async", "allreduce_async_"), f"tensor {REDUCE}"),
    "allreduce": f"tensor {SQUEEZED}",
    **dict.fromkeys(
        ("grouped_allreduce_", "grouped_allreduce_async", "grouped_allreduce_async_"),
        f"tensors {REDUCE}",
    ),
    "grouped_allreduce": f"tensors {SQUEEZED}",
    "sparse_allreduce_async": "tensor name op process_set",
    **dict.fromkeys(("allgather", "allgather_async"), "tensor name process_set"),
    **dict.fromkeys(("grouped_allgather", "grouped_allgather_async"), "tensors name process_set"),
    **dict.fromkeys(
        ("broadcast", "broadcast_", "broadcast_async", "broadcast_async_"),
        "tensor root_rank name process_set",
    ),
    **dict.fromkeys(("alltoall", "alltoall_async"), "tensor splits name process_set"),
    "reducescatter": f"tensor {SCATTER}".replace("name", "name compression"),
    "reducescatter_async": f"tensor {SCATTER}",
    "grouped_reducescatter": f"tensors {SCATTER}".replace("name", "name compression"),
    "grouped_reducescatter_async": f"tensors {SCATTER}",
    "join": "device",
    "barrier": "process_set",
    "poll": "handle",
    "synchronize": "handle",
    "broadcast_parameters": "params root_rank",
    "broadcast_optimizer_state": "optimizer root_rank model",
    "broadcast_object": "obj root_rank name process_set",
    "allgather_object": "obj name process_set",
    "add_process_set": "process_set",
    "remove_process_set": "process_set",
    "DistributedOptimizer": "optimizer named_parameters compression backward_passes_per_step op "
    "gradient_predivide_factor num_groups groups sparse_as_dense process_set",
}
MEMBERS = {
    "ProcessSet": "size rank included process_set_id ranks",
    "global_process_set": "size rank included process_set_id ranks",
    "Compression": "none fp16 bf16",
    "elastic": "run TorchState ElasticSampler State ObjectState init shutdown state sampler",
    "functions": "allgather_object broadcast_object broadcast_optimizer_state broadcast_parameters",
    "mpi_ops": "",
}
#: What horovod.torch has in addition to horovod.torch.mpi_ops.
ADDITIONAL = {"DistributedOptimizer", "SyncBatchNorm", "elastic", "functions", "mpi_ops"}
STATE = "save restore sync commit check_host_updates register_reset_callbacks on_reset reset"
HANDLERS = "StateHandler ModelStateHandler OptimizerStateHandler SamplerStateHandler"
REGISTRY = "get_handler_registry set_handler_registry"
SAMPLER = "record_batch set_epoch state_dict load_state_dict reset"


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_come_in_horovods_order(name: str) -> None:
    found = inspect.signature(getattr(hvd, name)).parameters.values()
    names = [one.name for one in found if one.kind is not inspect.Parameter.KEYWORD_ONLY]
    assert names == PARAMETERS[name].split()


def test_nothing_is_missing() -> None:
    for name, members in MEMBERS.items():
        made: Any = getattr(hvd, name)
        made = made([0]) if isinstance(made, type) and name == "ProcessSet" else made
        assert all(hasattr(made, member) for member in members.split()), name
    for kind in (hvd.elastic.State, hvd.elastic.ObjectState, hvd.elastic.TorchState):
        assert all(hasattr(kind, member) for member in STATE.split())
        assert issubclass(hvd.elastic.TorchState, kind)
    more = f"TorchState {HANDLERS} {REGISTRY}".split()
    assert all(hasattr(hvd.elastic.state, member) for member in more)
    assert hvd.elastic.sampler.ElasticSampler is hvd.elastic.ElasticSampler
    assert all(hasattr(hvd.elastic.ElasticSampler, member) for member in SAMPLER.split())
    assert issubclass(hvd.HorovodInternalError, RuntimeError)
    every = [hvd.Average, hvd.Sum, hvd.Adasum, hvd.Min, hvd.Max, hvd.Product]
    assert [int(one) for one in every] == list(range(6))
    assert set(hvd.__all__) == {*PARAMETERS, *MEMBERS, *BUILDS} | {
        *("Average", "Sum", "Adasum", "Min", "Max", "Product"),
        *("HorovodInternalError", "SyncBatchNorm"),
    }


def test_modules_have_the_names_that_scripts_import_from_them() -> None:
    within = {*MEMBERS["functions"].split(), *ADDITIONAL}
    assert set(hvd.__all__) - within <= set(hvd.mpi_ops.__all__)
    for module in (hvd.mpi_ops, hvd.functions):
        assert all(getattr(module, name) is getattr(hvd, name) for name in module.__all__)
    assert set(hvd.functions.__all__) == set(MEMBERS["functions"].split())


BUILDS = (
    *("mpi_threads_supported", "mpi_enabled", "mpi_built", "gloo_enabled", "gloo_built"),
    *("nccl_built", "ddl_built", "ccl_built", "cuda_built", "rocm_built"),
)


@pytest.mark.parametrize("name", BUILDS)
def test_none_of_horovods_media_is_in_the_build(name: str) -> None:
    wanted = "not part of this build" not in _core.device_summary() if name == "cuda_built" else 0
    found = getattr(hvd, name)()
    assert found == wanted and type(found) is (int if name == "nccl_built" else bool)
