"""DistributedOptimizer: reduces gradients while the backward pass runs."""

from __future__ import annotations

import itertools
import os
import warnings
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from pycoll.compress import Auto, Codec
from pycoll.gradients.methods import method_of
from pycoll.gradients.policies import AUTO, Policy
from pycoll.torch.compression import Compression, Compressor
from pycoll.torch.horovod import horovod_world, variables
from pycoll.torch.horovod.process_sets import ProcessSet, global_process_set
from pycoll.torch.horovod.scaled_ops import Adasum, Average, ReduceOp, Sum, check_op
from pycoll.torch.memory.compiling import is_compiled
from pycoll.torch.memory.deferred_step import DeferredSteps
from pycoll.torch.optimizers.coded_state import Parameters
from pycoll.torch.optimizers.gradients import Gradients, Settings
from pycoll.torch.optimizers.policy_gradients import ScheduledGradients
from pycoll.torch.optimizers.wrapped_optimizers import (
    AdasumWrapped,
    DeferringWrapped,
    Wrapped,
    default_names,
    wrapped_by,
)

if TYPE_CHECKING:
    from pycoll.ps import Store


def DistributedOptimizer(  # noqa: N802  # the name that programs use
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: Compressor | Codec | Auto | str = Compression.none,
    backward_passes_per_step: int = 1,
    op: Any = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
    *,
    policy: Any = None,
    architecture: str | None = None,
    model: torch.nn.Module | None = None,
    consistency: Any = None,
    store: Store | None = None,
) -> Any:
    """Wrap an optimizer so that it steps by the gradients of all ranks.

    The backward pass starts the reduction of each gradient by ``op`` as soon as the gradient is
    ready. ``step()`` waits for all reductions before it steps.

    Arguments:
        ``optimizer``: the optimizer to wrap; do not use it afterwards.
        ``named_parameters``: usually ``model.named_parameters()``. Names decide which gradients of
            the ranks are reduced together. Without them, parameters must have the same order on
            all ranks.
        ``compression``: a compressor of ``Compression``, applied to each gradient for the transfer,
            or a codec of ``pycoll.compress``. A codec has feedback for each gradient or group; the
            gradients are in host memory, and float32 for codecs that keep every element. With a
            policy they are float32 for all codecs. A ``pycoll.compress.Auto``, or "auto", picks a
            codec or none for each message; without a policy it implies ``policy="auto"``.
        ``backward_passes_per_step``: the number of backward passes that add to a gradient before
            it is reduced.
        ``op``: Average, Sum, Adasum, Min, Max or Product. With Adasum, each rank steps by its own
            gradients, and ``step()`` combines the changes of the parameters.
        ``gradient_predivide_factor``: f; with Average, gradients are divided by f before the sum
            and by size / f after it.
        ``num_groups``: the deprecated name of ``groups``.
        ``groups``: a number of groups, or lists of parameters; the gradients of a group are reduced
            together.
        ``sparse_as_dense``: whether to reduce sparse gradients as dense ones.
        ``process_set``: the ranks that take part.
        ``policy``: how gradients become messages: a policy or a method by name, or a
            ``pycoll.optim.Policy``. Without a policy, each gradient or group is reduced when all
            ranks have it.
        ``architecture``: with a policy, "a2a", "ps" or "auto"; see ``pycoll.optim.Scheduler``.
            The servers are those of the job. Without any, and in a process set other than the
            global one, every rank is the server of a share.
        ``model``: with a policy, the module that owns the parameters. ``step()`` then does not
            wait. Each parameter steps when the next forward pass, or any other code, reads it; see
            memory/deferred_step.py. Once torch.compile compiles code in the process, ``step()``
            steps all parameters at once; a warning and ``explain()`` say so.
        ``consistency``: with ``architecture="ps"`` and without a policy, "bsp",
            ``pycoll.ps.BSP(elastic=True)``, "asp", ``pycoll.ps.SSP(staleness)`` or
            ``pycoll.ps.Backup(share)``: ``step()`` works with a store on the servers of the job.
            With both kinds of "bsp" it returns the mean of the gradients, and any optimizer steps
            by it; the elastic one goes on with the workers that are left. With the others, servers
            hold the parameters and step: they begin with those of the first worker, and ``step()``
            pushes the gradients of this worker and takes the new parameters. The optimizer is then
            torch's SGD, Adagrad or Adam. The settings of the first worker hold, also when they
            change; "asp" and SSP step once for each push. docs/guides/when-servers.md says which
            one to take.
        ``store``: a store to work with, from ``pycoll.ps.connect``; its consistency holds. Its
            servers and replicas are those that the program chose, and the program closes it.

    Result: an optimizer with the class name of ``optimizer`` that shares its parameter groups and
    state. It also has ``synchronize()``, ``skip_synchronize()``, ``explain()`` and
    ``set_backward_passes_per_step(n)``; with a consistency also ``store``. Use its own
    ``add_param_group`` for parameters that need gradients later: ``step()`` raises ValueError for a
    gradient that no rank reduces. Save its ``state_dict()``; the optimizer itself cannot be
    pickled. With a codec each rank saves its own: the entry "compression" has what this rank has
    left out of gradients, by the names of parameters. A state without it begins without residuals.

    Errors: ValueError for these arguments:
        * parameters without a name or with equal names, and invalid groups;
        * fewer than one backward pass, and a predivide factor without Average;
        * an unknown policy, and a policy with groups, Adasum or parameters on a device;
        * a codec with an op other than Average and Sum; with a policy also the policy dear, the
          architecture "ps" and parameters that are not float32;
        * an unknown architecture, and an architecture without a policy or a consistency;
        * an unknown consistency, one without architecture="ps", and one other than the store's;
        * a consistency in a job without servers;
        * with a consistency: a policy, groups, a model, a compression, an op other than Average, a
          predivide factor, a process set, and parameters on a device;
        * with a consistency other than both kinds of "bsp": an optimizer or a setting that servers
          do not have, an optimizer that has stepped, and later a parameter that was changed
          elsewhere;
        * Adasum with a process set other than the global one;
        * with ``model``: no policy, or a model that is not a torch.nn.Module, lacks parameters or
          is compiled;
        * with ``model``: an optimizer that is not one of torch, or that does not treat every
          parameter by itself (L-BFGS).
    A backward pass raises AssertionError if a gradient is computed more than
    ``backward_passes_per_step`` times before ``step()``.

    Cost: one all-reduce per gradient, group or message in every step. With a policy, each gradient
    is copied once, into the memory of a ``pycoll.optim.Scheduler``. With a consistency, ``step()``
    pushes and pulls as many bytes as the parameters have, and a copy of them is kept.

    Source: the interface is that of Horovod; the policies are described in docs/scheduling.md.

    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    >>> optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    >>> model(torch.ones(1, 2)).sum().backward()
    >>> optimizer.step()
    """
    reduction = check_op(op)
    _check_numbers(reduction, gradient_predivide_factor, backward_passes_per_step)
    if num_groups:
        warnings.warn("num_groups is now called groups", DeprecationWarning, stacklevel=2)
        groups = num_groups if groups is None else groups
    compressor, codec = _compression(compression)
    settings = Settings(
        compressor,
        reduction,
        gradient_predivide_factor,
        sparse_as_dense,
        process_set,
        architecture,
        codec,
    )
    if consistency is not None or store is not None:
        # Stores are imported for programs that have one.
        from pycoll.torch.optimizers.stored_optimizers import agreed_consistency, stored_optimizer

        agreed = agreed_consistency(consistency, store, architecture)
        _check_alone(agreed, settings, policy=policy, groups=groups, model=model)
        names, given = _names_of(optimizer, named_parameters)
        wrapped = stored_optimizer(optimizer, names, settings, agreed, store)
    else:
        if policy is None and isinstance(codec, Auto):
            policy = AUTO  # the scheduler of a policy picks codecs
        policy, architecture = _method(policy, architecture)
        settings = settings._replace(architecture=architecture)
        _check_codec(codec, reduction)
        if policy is not None and (groups is not None or reduction == Adasum):
            what = "groups" if groups is not None else "op=Adasum"
            raise ValueError(f"policy is {policy} and there is {what}: they exclude each other")
        names, given = _names_of(optimizer, named_parameters)
        if model is not None:
            _check_model(optimizer, names, policy, model)
        wrapped = _reducing(optimizer, names, settings, (policy, groups, model))
    wrapped._settings, wrapped._groups = settings, groups
    wrapped._synchronized, wrapped._should_synchronize = False, True
    wrapped._names, wrapped._names_given = names, given
    wrapped._frozen = [p for p in names if not p.requires_grad]
    wrapped.set_backward_passes_per_step(backward_passes_per_step)
    return wrapped


def _reducing(
    optimizer: torch.optim.Optimizer,
    names: dict[torch.Tensor, str],
    settings: Settings,
    chosen: tuple[Policy | None, Any, torch.nn.Module | None],
) -> Any:
    """An optimizer that reduces gradients; ``chosen``: policy, groups and model."""
    policy, groups, model = chosen
    by_adasum = settings.op == Adasum and horovod_world.size() > 1
    if by_adasum and settings.process_set.process_set_id != 0:
        raise ValueError(
            f"op is Adasum and process_set is {settings.process_set}: it needs all ranks"
        )
    buckets = _buckets(optimizer, groups)
    gradients = (
        None if by_adasum else _gradients(names, buckets, settings, policy, model is not None)
    )
    overlaps = model is not None and isinstance(gradients, ScheduledGradients)
    mixin = AdasumWrapped if by_adasum else DeferringWrapped if overlaps else Wrapped
    wrapped = wrapped_by(optimizer, mixin)
    if not by_adasum:
        wrapped._gradients, wrapped._policy = gradients, policy
    if model is not None and isinstance(gradients, ScheduledGradients):
        wrapped._deferred = DeferredSteps(gradients, model, wrapped.step_groups)
    return wrapped


def _check_alone(consistency: Any, settings: Settings, **excluded: Any) -> None:
    """Raise ValueError for an argument that a store excludes."""
    given = {name: one for name, one in excluded.items() if one is not None}
    if settings.codec is not None or settings.compression is not Compression.none:
        given["compression"] = settings.codec or settings.compression
    if settings.op != Average:
        given["op"] = settings.op.name
    if settings.predivide != 1.0:
        given["gradient_predivide_factor"] = settings.predivide
    if settings.process_set.process_set_id != 0:
        given["process_set"] = settings.process_set
    for name, one in given.items():
        raise ValueError(
            f"{name} is {one} and consistency is {consistency}: with a store, leave {name} out"
        )


def _check_numbers(reduction: ReduceOp, predivide: float, passes: int) -> None:
    if predivide != 1.0 and reduction != Average:
        raise ValueError(
            f"gradient_predivide_factor is {predivide} and op is {reduction.name}: "
            "it can be used with Average only"
        )
    if passes <= 0:
        raise ValueError(f"backward_passes_per_step is {passes}: expected at least 1")


def _compression(given: Any) -> tuple[Compressor, Codec | Auto | None]:
    """The compressor, and the codec or choice of codecs."""
    codec = Auto() if isinstance(given, str) and given == AUTO else given
    if isinstance(codec, Codec | Auto):
        return Compression.none, codec
    if not hasattr(codec, "decompress"):
        raise ValueError(
            f"compression is {given!r}: expected one of hvd.Compression, a codec such as "
            "pycoll.compress.Block('int8'), or a pycoll.compress.Auto"
        )
    return codec, None


def _check_codec(codec: Codec | Auto | None, reduction: ReduceOp) -> None:
    if codec is not None and reduction not in (Average, Sum):
        raise ValueError(
            f"compression is {codec!r} and op is {reduction.name}: codecs take Average or Sum"
        )


def _method(given: Any, architecture: str | None) -> tuple[Policy | None, str | None]:
    """Policy and architecture; a policy by name takes its bucket from HOROVOD_FUSION_THRESHOLD."""
    if given is None and architecture is not None:
        raise ValueError(
            f"architecture is {architecture!r} and policy is not given: pass policy='auto'"
        )
    if given is None:
        return None, None
    found, architecture = method_of(given, architecture)
    most = variables.read().fusion_bytes
    if isinstance(given, str) and most:
        found = replace(found, bucket_bytes=most)
    return found, architecture


def _gradients(
    names: dict[torch.Tensor, str],
    buckets: list[Parameters],
    settings: Settings,
    policy: Policy | None,
    overlaps: bool,
) -> Any:
    """The object that reduces the gradients; None where this rank has no peers."""
    elastic = os.environ.get("HOROVOD_ELASTIC") == "1"
    if not settings.process_set.included() or not (horovod_world.size() > 1 or elastic):
        return None
    if policy is None:
        return Gradients(names, buckets, settings)
    return ScheduledGradients(names, settings, policy, overlaps)


def _check_model(
    optimizer: torch.optim.Optimizer,
    names: dict[torch.Tensor, str],
    policy: Policy | None,
    model: Any,
) -> None:
    """Raise ValueError unless steps can be deferred to the forward pass of this model."""
    if policy is None:
        raise ValueError("model is given and policy is not: deferred steps need a policy")
    if not isinstance(model, torch.nn.Module):
        raise ValueError(f"model is {model!r}: expected a torch.nn.Module")
    compiled = next((name for name, one in model.named_modules() if is_compiled(one)), None)
    if compiled is not None:
        what = (
            f"has {compiled!r}, which is compiled" if compiled else f"is a {type(model).__name__}"
        )
        raise ValueError(
            f"model {what}: parameters of compiled modules cannot step one by one; leave out model="
        )
    owned = set(model.parameters())
    lacks = [name for parameter, name in names.items() if parameter not in owned]
    if lacks:
        raise ValueError(
            f"model lacks {len(lacks)} of the optimizer's {len(names)} parameters, the first being "
            f"{lacks[0]!r}"
        )
    made_by = type(optimizer).step.__module__
    if isinstance(optimizer, torch.optim.LBFGS) or not made_by.startswith("torch.optim."):
        raise ValueError(
            f"optimizer is a {type(optimizer).__name__}: with model=, it has to be one of torch's "
            "that treat every parameter by itself"
        )


def _parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _names_of(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, torch.Tensor]] | None
) -> tuple[dict[torch.Tensor, str], dict[torch.Tensor, str]]:
    """The names of the optimizer's parameters, in group order, and all names that were given."""
    parameters = _parameters_of(optimizer)
    if named_parameters is None:
        groups = enumerate(group["params"] for group in optimizer.param_groups)
        return {
            p: name
            for number, group in groups
            for p, name in zip(group, default_names(number, group), strict=True)
        }, {}
    pairs = list(named_parameters)
    if any(not isinstance(one, tuple) or len(one) != 2 for one in pairs):
        raise ValueError(
            "named_parameters has an entry that is not a (name, parameter) pair: pass "
            "model.named_parameters()"
        )
    seen = [name for name, _ in pairs]
    twice = sorted(name for name, count in Counter(seen).items() if count > 1)
    if twice:
        raise ValueError(f"named_parameters has names twice: {', '.join(map(str, twice))}")
    names = {p: name for name, p in reversed(pairs)}
    unnamed = [number for number, p in enumerate(parameters) if p not in names]
    if unnamed:
        raise ValueError(
            f"named_parameters lacks {len(unnamed)} of the optimizer's {len(parameters)} "
            f"parameters, the first being number {unnamed[0]}"
        )
    return {p: names[p] for p in parameters}, names


def _buckets(optimizer: torch.optim.Optimizer, groups: Any) -> list[Parameters]:
    """The buckets: tuples of parameters that are reduced together."""
    parameters = [p for p in _parameters_of(optimizer) if p.requires_grad]
    if groups is None:
        return [(p,) for p in parameters]
    is_count = isinstance(groups, int) and not isinstance(groups, bool) and groups > 0
    if not isinstance(groups, list) and not is_count:
        raise ValueError(f"groups is {groups!r}: expected a number above 0, or lists of parameters")
    if not isinstance(groups, list):
        count = min(int(groups), len(parameters))
        ends = [len(parameters) * number // count for number in range(count + 1)]
        return [tuple(parameters[start:end]) for start, end in itertools.pairwise(ends)]
    if any(not isinstance(group, list | tuple) for group in groups):
        raise ValueError("groups has an entry that is no list of parameters")
    grouped = [p for group in groups for p in group]
    if any(not isinstance(p, torch.Tensor) for p in grouped):
        raise ValueError("groups has an entry that is no list of parameters")
    if len({id(p) for p in grouped}) != len(grouped):
        raise ValueError("groups has a parameter twice")
    every = {id(p) for p in _parameters_of(optimizer)}
    strange = [number for number, group in enumerate(groups) for p in group if id(p) not in every]
    if strange:
        raise ValueError(
            f"groups has {len(strange)} parameters that are not the optimizer's, the first in "
            f"group {strange[0]}"
        )
    known = {id(p) for p in parameters}
    buckets = [tuple(p for p in group if id(p) in known) for group in groups]
    single = [(p,) for p in parameters if all(p is not one for one in grouped)]
    return [bucket for bucket in buckets if bucket] + single
