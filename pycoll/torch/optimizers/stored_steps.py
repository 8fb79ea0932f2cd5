"""The parameters of an optimizer as arrays of a store on parameter servers.

With "bsp" the servers return the mean of the workers' gradients (``StoredGradients``). With any
other consistency they hold the parameters and step (``StoredParameters``). The parameters of a
group that have one dtype are one key of the store, so a step takes few messages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from pycoll.ps import SGD, Adagrad, Adam, Optimizer, Store
from pycoll.torch.optimizers.gradients import dense, put_back

Groups = Sequence[dict[str, Any]]
Names = dict[torch.Tensor, str]

_NEVER = {"maximize": False, "differentiable": False}
#: By class of torch the settings that servers do not have, with the only value they may have.
_LACKING: dict[type, dict[str, Any]] = {
    torch.optim.SGD: {"dampening": 0, **_NEVER},
    torch.optim.Adagrad: {"lr_decay": 0, **_NEVER},
    torch.optim.Adam: {
        "weight_decay": 0,
        "amsgrad": False,
        "decoupled_weight_decay": False,
        **_NEVER,
    },
}
_STEPPED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def server_optimizer(kind: type, number: int, group: dict[str, Any]) -> Optimizer:
    """The optimizer by which servers step group ``number`` as ``kind`` does.

    Raises ValueError for a class and for settings that servers do not have.
    """
    lacking = _LACKING.get(kind)
    if lacking is None:
        names = ", ".join(f"torch.optim.{one.__name__}" for one in _LACKING)
        raise ValueError(
            f"optimizer is a {kind.__name__}: servers step by {names} and no other one; with "
            "consistency='bsp' workers step, by any optimizer"
        )
    for name, only in lacking.items():
        if group.get(name, only) != only:
            raise ValueError(
                f"param_groups[{number}] has {name}={group[name]!r}, which servers do not have: "
                f"expected {only!r} for {kind.__name__}"
            )
    rate = float(group["lr"])
    if kind is torch.optim.Adam:
        first, second = group["betas"]
        return Adam(rate, (float(first), float(second)), float(group["eps"]))
    decay = float(group["weight_decay"])
    if kind is torch.optim.SGD:
        return SGD(rate, float(group["momentum"]), decay, bool(group["nesterov"]))
    initial = float(group["initial_accumulator_value"])
    return Adagrad(rate, float(group["eps"]), decay, initial)


class Block:
    """The parameters of group ``group`` that have one dtype, as one array ``values``.

    ``key``: its name in the store. ``values`` holds parameters or gradients in turn.
    """

    def __init__(self, key: str, group: int, parameters: Sequence[torch.Tensor]) -> None:
        self.key = key
        self.group = group
        self.parameters = parameters
        sizes = [one.numel() for one in parameters]
        self.values = torch.zeros(sum(sizes), dtype=parameters[0].dtype)
        pieces = self.values.split(sizes)
        self.views = [one.view(p.shape) for one, p in zip(pieces, parameters, strict=True)]
        #: By parameter the number of changes that torch had counted when servers wrote it.
        self._versions: list[int] = []

    def read_parameters(self) -> None:
        """Copy the parameters into ``values``."""
        for parameter, view in zip(self.parameters, self.views, strict=True):
            view.copy_(parameter.detach())

    def write_parameters(self) -> None:
        """Copy ``values`` into the parameters."""
        with torch.no_grad():
            for parameter, view in zip(self.parameters, self.views, strict=True):
                parameter.copy_(view)
        self._versions = [one._version for one in self.parameters]

    def check_unchanged(self, names: Names) -> None:
        """Raise ValueError for a parameter that differs from what ``write_parameters`` wrote."""
        for parameter, view, version in zip(
            self.parameters, self.views, self._versions, strict=True
        ):
            if parameter._version != version and not torch.equal(parameter, view):
                raise ValueError(
                    f"{names[parameter]!r} was changed after the last step, and the servers hold "
                    "its values, which the next step brings back: change parameters before the "
                    "DistributedOptimizer is made, or make it anew"
                )

    def read_gradients(self, names: Names, takes_sparse: bool) -> None:
        """Copy the gradients into ``values``; a missing one counts as zeros.

        Raises ValueError for a sparse gradient, unless ``takes_sparse``.
        """
        for parameter, view in zip(self.parameters, self.views, strict=True):
            grad = parameter.grad
            if grad is None:
                view.zero_()
            elif grad.is_sparse and not takes_sparse:
                raise ValueError(
                    f"the gradient of {names[parameter]!r} is sparse: pass sparse_as_dense=True, "
                    "or hold the rows in a table (pycoll.ps.Store.table)"
                )
            else:
                view.copy_(dense(grad))

    def write_gradients(self) -> None:
        """Copy ``values`` into the gradients; all parameters have one afterwards."""
        for parameter, view in zip(self.parameters, self.views, strict=True):
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            put_back(parameter, view)


def blocks_of(groups: Groups, names: Names) -> list[Block]:
    """The blocks of an optimizer's parameters that need gradients.

    Raises ValueError for parameters on a device, and where there is no parameter.
    """
    blocks = []
    for number, group in enumerate(groups):
        by_type: dict[torch.dtype, list[torch.Tensor]] = {}
        for parameter in group["params"]:
            if parameter.device.type != "cpu":
                raise ValueError(
                    f"{names[parameter]!r} is on {parameter.device}: servers hold arrays in host "
                    "memory; keep the parameters there, or leave consistency out"
                )
            if parameter.requires_grad:
                by_type.setdefault(parameter.dtype, []).append(parameter)
        for found in by_type.values():
            more = f" and {len(found) - 1} more" if len(found) > 1 else ""
            blocks.append(Block(names[found[0]] + more, number, found))
    if not blocks:
        raise ValueError("optimizer has no parameter that needs a gradient: there is no step")
    return blocks


class _Stored:
    """Blocks in a store. Threads: one."""

    def __init__(self, store: Store, blocks: list[Block], names: Names, takes_sparse: bool) -> None:
        self.store = store
        self._blocks = blocks
        self._names = names
        self._takes_sparse = takes_sparse
        known = store.stats()["keys"]
        for block in blocks:
            if block.key in known:
                raise ValueError(
                    f"the store has a key {block.key!r} already: give each optimizer of a store "
                    "parameters with names of their own"
                )

    def _each(self, call: Callable[[Block, bool], Any]) -> None:
        """Call the store for all blocks at once: ``call`` takes a block and ``async_op``."""
        if len(self._blocks) == 1:
            call(self._blocks[0], False)
            return
        for work in [call(block, True) for block in self._blocks]:
            work.wait()

    def _exchange(self, block: Block, async_op: bool) -> Any:
        values = block.values
        return self.store.push_pull(block.key, values, out=values, async_op=async_op)

    def _read_gradients(self) -> None:
        for block in self._blocks:
            block.read_gradients(self._names, self._takes_sparse)


class StoredGradients(_Stored):
    """Replaces gradients by their mean over the workers of a store with "bsp".

    All workers call ``synchronize`` equally often. ``passes``, ``counts`` and ``under_way`` are
    those of ``Gradients``; nothing is under way outside ``synchronize``.
    """

    def __init__(self, store: Store, blocks: list[Block], names: Names, takes_sparse: bool) -> None:
        super().__init__(store, blocks, names, takes_sparse)
        self.passes = 1
        self.counts: dict[torch.Tensor, int] = {}
        self.under_way: dict[Any, Any] = {}
        for block in blocks:
            store.init(block.key, block.values, update="mean")

    def synchronize(self) -> None:
        """Push the gradients of this worker, and store the means in their place."""
        self._read_gradients()
        self._each(self._exchange)
        for block in self._blocks:
            block.write_gradients()

    def reset(self) -> None:
        """Do nothing: no backward pass is counted."""


class StoredParameters(_Stored):
    """Parameters that servers hold and step, by the optimizer of class ``kind``.

    ``groups``: its parameter groups. All workers begin with the parameters of the first one.
    """

    def __init__(
        self,
        store: Store,
        blocks: list[Block],
        names: Names,
        takes_sparse: bool,
        stepping: tuple[type, Groups],
    ) -> None:
        self._kind, groups = stepping
        self._told = self._optimizers(groups)
        super().__init__(store, blocks, names, takes_sparse)
        for block in blocks:
            block.read_parameters()
            store.init(block.key, block.values)
        if store._is_first():
            self._tell()
        # The worker that makes this key tells the servers the optimizer first, also if an earlier
        # one has died. The others wait for the key, so no push comes earlier.
        store._init(f"{blocks[0].key}: has an optimizer", np.zeros(0), "add", self._tell)
        self._each(self._pull)
        for block in blocks:
            block.write_parameters()

    def _optimizers(self, groups: Groups) -> list[Optimizer]:
        return [server_optimizer(self._kind, *one) for one in enumerate(groups)]

    def _tell(self) -> None:
        """Tell the servers the optimizer of each block."""
        for block in self._blocks:
            self.store.set_optimizer(self._told[block.group], block.key)

    def _pull(self, block: Block, async_op: bool) -> Any:
        return self.store.pull(block.key, out=block.values, async_op=async_op)

    def _push(self, block: Block, async_op: bool) -> Any:
        return self.store.push(block.key, block.values, async_op=async_op)

    def step(self, groups: Groups) -> None:
        """Push the gradients, and take the parameters that the servers hold then.

        Settings of ``groups`` that have changed on the first worker reach the servers first.
        """
        wanted = self._optimizers(groups)
        for block in self._blocks:
            block.check_unchanged(self._names)
        self._read_gradients()
        if wanted != self._told:
            self._told = wanted
            if self.store._is_first():
                self._tell()
        consistency = self.store.consistency
        if consistency.folds or consistency.staleness is None:
            self._each(self._exchange)
        else:
            # The clock bounds what the pull may see, so it comes first.
            self._each(self._push)
            self.store.clock()
            self._each(self._pull)
        for block in self._blocks:
            block.write_parameters()


def check_steppable(optimizer: torch.optim.Optimizer, names: Names) -> None:
    """Raise ValueError unless servers can step this optimizer from its beginning."""
    for number, group in enumerate(optimizer.param_groups):
        server_optimizer(type(optimizer), number, group)
        for parameter in group["params"]:
            if parameter.requires_grad and parameter.dtype not in _STEPPED:
                words = ", ".join(str(one).removeprefix("torch.") for one in _STEPPED)
                raise ValueError(
                    f"{names[parameter]!r} has type {parameter.dtype}: servers step {words}"
                )
            kept = optimizer.state.get(parameter, {})
            # Adagrad has a state before its first step; SGD does not count steps.
            if any(one is not None for one in kept.values()) and float(kept.get("step", 1)):
                raise ValueError(
                    f"optimizer has a state for {names[parameter]!r}, and servers begin without "
                    "any: make the DistributedOptimizer before the first step"
                )
