"""The memory of a DistributedOptimizer's codec, as an entry of the optimizer's state_dict.

The entry has tensors by the names of parameters, so that torch.load takes it with weights_only:

| field | meaning |
|---|---|
| ``residuals`` | the residual of this rank for each gradient |
| ``factors`` | the last Q of PowerSGD of each matrix, equal on all ranks |
| ``steps``, with a policy ``step`` | the number of calls, from which codecs draw; equal on all |

A rank that takes the state of another one keeps its own residuals.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

from pycoll.compress import Feedback
from pycoll.compress.feedback import FORM as FEEDBACK_FORM
from pycoll.errors import InvalidArgumentError

Parameters = tuple[torch.Tensor, ...]
#: The entry of state_dict().
ENTRY = "compression"
#: The version of the entry's form without a policy.
FORM = 1
_ARRAYS = ("residuals", "factors")


def check_idle(is_under_way: bool) -> None:
    """Raise RuntimeError while gradients are being reduced: their residuals change meanwhile."""
    if is_under_way:
        raise RuntimeError(
            "optimizer.state_dict() while gradients are being reduced by a codec: call "
            "optimizer.step() or optimizer.synchronize() before"
        )


def as_tensors(state: Mapping[str, Any]) -> dict[str, Any]:
    """A state of a Scheduler with tensors, which share the memory of its arrays."""
    found = {
        field: {name: torch.from_numpy(one) for name, one in state[field].items()}
        for field in _ARRAYS
    }
    return {**state, **found}


def as_arrays(entry: Any) -> Any:
    """An entry with NumPy arrays; what is no entry stays as it is."""
    if not isinstance(entry, Mapping):
        return entry
    found = {
        field: {name: _array(one) for name, one in entry[field].items()}
        for field in _ARRAYS
        if field in entry
    }
    return {**entry, **found}


def without_residuals(entry: Mapping[str, Any]) -> dict[str, Any]:
    """The part of an entry that other ranks take."""
    return {**entry, "residuals": {}}


def with_residuals_of(own: Mapping[str, Any], taken: Mapping[str, Any]) -> dict[str, Any]:
    """The entry of a rank that takes the one of another rank."""
    return {**taken, "residuals": own["residuals"]}


def check_policy(entry: Any, has_policy: bool) -> None:
    """Raise InvalidArgumentError for an entry of an optimizer with a policy, or of one without.

    Their residuals have other units: a policy divides sums, and other calls send means.
    """
    if isinstance(entry, Mapping) and ("step" if not has_policy else "steps") in entry:
        its, own = ("a policy", "none") if not has_policy else ("no policy", "one")
        raise InvalidArgumentError(
            f"the entry {ENTRY!r} of the saved state is that of an optimizer with {its}, and this "
            f"one has {own}: leave the entry out to begin without residuals"
        )


def saved_feedbacks(
    feedbacks: Mapping[Parameters, Feedback], names: Mapping[torch.Tensor, str]
) -> dict[str, Any]:
    """The entry of an optimizer without a policy: copies of what the Feedback of a bucket holds."""
    steps: dict[str, int] = {}
    arrays: dict[str, dict[str, torch.Tensor]] = {field: {} for field in _ARRAYS}
    for bucket, feedback in feedbacks.items():
        state = feedback.state_dict()
        for number, parameter in enumerate(bucket):
            steps[names[parameter]] = state["step"]
            for field in _ARRAYS:
                if number in state[field]:
                    one = torch.from_numpy(state[field][number])
                    arrays[field][names[parameter]] = one
    return {"form": FORM, "steps": steps, **arrays}


def loaded_feedbacks(
    entry: Any, buckets: Iterable[Parameters], names: Mapping[torch.Tensor, str]
) -> dict[Parameters, Feedback]:
    """The Feedback of each bucket that an entry of ``saved_feedbacks`` has; no entry has none.

    Raises InvalidArgumentError for another form, and for parameters that are not these.
    """
    if entry is None:
        return {}
    check_policy(entry, has_policy=False)
    if not isinstance(entry, Mapping) or entry.get("form") != FORM or "steps" not in entry:
        raise InvalidArgumentError(
            f"the entry {ENTRY!r} of the saved state is a {type(entry).__name__} without form "
            f"{FORM}: expected what state_dict() of an optimizer with a codec has"
        )
    state, steps = as_arrays(entry), entry["steps"]
    shapes = {name: tuple(parameter.shape) for parameter, name in names.items()}
    for name, one in state["residuals"].items():
        if one.shape != shapes.get(name):
            raise InvalidArgumentError(
                f"the saved state has a residual of {name!r} with shape {one.shape}, and no "
                "parameter is like that"
            )
    found = {}
    for bucket in buckets:
        own = [names[parameter] for parameter in bucket]
        if not any(name in steps or name in state["residuals"] for name in own):
            continue
        arrays = {
            field: {number: state[field][name] for number, name in enumerate(own)
                    if name in state[field]}
            for field in _ARRAYS
        }  # fmt: skip
        step = max(steps.get(name, 0) for name in own)
        found[bucket] = feedback = Feedback()
        feedback.load_state_dict({"form": FEEDBACK_FORM, "step": step, "velocities": {}, **arrays})
    return found


def _array(one: Any) -> Any:
    """A tensor of any device as a NumPy array; an array stays as it is."""
    return np.asarray(one.detach().cpu() if isinstance(one, torch.Tensor) else one)
