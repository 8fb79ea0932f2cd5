"""Checks of elastic states and samplers on every rank of a world that stays; see torch_ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch_ranks import raised

import pycoll.torch as hvd
from pycoll.torch.elastic.state import (
    StateHandler,
    get_handler_registry,
    set_handler_registry,
)


def check_a_sampler_shares_what_is_left() -> None:
    size, rank = hvd.size(), hvd.rank()
    sampler = hvd.elastic.ElasticSampler(range(10), shuffle=False)
    assert (sampler.num_replicas, sampler.rank) == (size, rank)
    assert sampler.remaining_indices == list(range(10))
    assert sampler.num_samples == len(sampler) == -(-10 // size)
    assert sampler.total_size == len(sampler) * size
    every = (list(range(10)) * 2)[: sampler.total_size]
    assert list(sampler) == sampler.indices == every[rank::size]
    sampler.record_batch(0, 2)
    sampler.load_state_dict(sampler.state_dict())
    assert sampler.remaining_indices == list(range(2 * size, 10))
    sampler.set_epoch(1)
    assert sampler.remaining_indices == list(range(10))
    shuffled = hvd.elastic.ElasticSampler(range(10), seed=3)
    told = hvd.allgather_object(shuffled.remaining_indices)
    assert all(sorted(one) == list(range(10)) and one == told[0] for one in told)


def check_objects_of_a_state() -> None:
    calls: list[Any] = []

    def given(obj: Any, **words: Any) -> Any:
        calls.append(words)
        return hvd.broadcast_object(obj, **words)

    state = hvd.elastic.ObjectState(given, hvd.rank, epoch=hvd.rank() + 5, seen=[hvd.rank()])
    state.sync()
    assert (state.epoch, state.seen, calls) == (5, [0], [{}, {}])
    state.seen.append(9)
    state.epoch += 1
    state.restore()
    assert (state.epoch, state.seen) == (5, [0])
    if hvd.rank() == hvd.size() - 1:
        state.epoch = 7
        state.commit()
    state.sync()
    assert (state.epoch, state.commits) == (7, 1)
    assert "ObjectState has no 'batch': it has epoch, seen" in raised(
        AttributeError, getattr, state, "batch"
    )


def check_a_state_of_ones_own() -> None:
    """``run`` needs no more than State says, and tells what is missing."""
    told: list[str] = []

    class Own(hvd.elastic.State):
        def save(self) -> None:
            told.append("save")

        def restore(self) -> None:
            told.append("restore")

        def sync(self) -> None:
            told.append("sync")

        def reset(self) -> None:
            told.append("reset")

    state = Own(hvd.broadcast_object, hvd.rank)
    state.register_reset_callbacks([lambda: told.append("callback")])

    @hvd.elastic.run
    def train(state: Any, rounds: int) -> int:
        state.commit()
        return rounds + 1

    assert train(state, 2) == 3 and state.commits == 1
    state.on_reset()
    assert told == ["sync", "save", "reset", "callback"]
    bare = hvd.elastic.State(hvd.broadcast_object, hvd.rank)
    assert "State has no sync()" in raised(TypeError, bare.sync)


def check_handlers_of_ones_own() -> None:
    class Table(dict[str, torch.Tensor]):
        pass

    class TableHandler(StateHandler):
        def __init__(self, value: Table) -> None:
            super().__init__(value)
            self.save()

        def save(self) -> None:
            self._saved = {name: one.clone() for name, one in self.value.items()}

        def restore(self) -> None:
            self.value.update({name: one.clone() for name, one in self._saved.items()})

        def sync(self) -> None:
            hvd.broadcast_parameters(self.value, self.root)
            self.save()

    before = list(get_handler_registry())
    set_handler_registry([(Table, TableHandler), *before])
    try:
        table = Table(a=torch.full((2,), float(hvd.rank())))
        state = hvd.elastic.TorchState(torch.nn.Linear(1, 1), table=table)
    finally:
        set_handler_registry(before)
    if hvd.rank() == hvd.size() - 1:
        state.commit()
    state.sync()
    wanted = torch.full((2,), hvd.size() - 1.0)
    assert torch.equal(table["a"], wanted) and state.table is table
    table["a"].zero_()
    state.restore()
    assert torch.equal(table["a"], wanted)
    state.table = Table(a=torch.ones(1))
    state.restore()
    assert torch.equal(state.table["a"], torch.ones(1)), "what is replaced is remembered"
