"""Reduce gradients over all ranks while the backward pass runs, in messages cut by a policy.

    gradients in the order     communication plan: messages      spans of memory, each
    of the backward pass  -->  in the order in which all   -->   handed to the progress
    sizes, times, rates        ranks send them                   thread when complete
                               (policies, chooser; pure)         (layout, scheduler)

The backward pass produces the gradients of a step one after the other. Sending each gradient alone
pays the start cost once per gradient. Sending all gradients as one message wastes the time of the
backward pass. The modules of ``pycoll.gradients`` cover the ways in between:

    communication_plan   the data types
    points               the space of communication plans
    policies             the known policies by name: each returns a point
    methods              the survey's methods by name: a policy with an architecture
    simulate             predicts the time of a step for a communication plan
    search               walks from point to point to a shorter step
    chooser              picks the plan with the shortest predicted step
    compare              predicts all methods for a cluster, without any rank
    measure              measures the cost of messages on a communicator
    scheduler            executes the plan

A communication plan is a function of values that are equal on all ranks, so ranks never ask each
other what to send next. A message is sent when its gradients are ready and all messages in front
of it have been sent.

All policies give the same bits. Every sum is folded in rank order (``deterministic=True`` of the
collectives restricts them to the algorithms that fold this way; reduce_scatter folds alike). The
result depends neither on the position of a value in a message nor on the algorithm among these. On
one host the restriction costs nothing where the fastest algorithms fold in rank order anyway.
Between hosts it excludes algorithms that combine inside each host first;
``deterministic=False`` allows those again.

``Scheduler`` serves arrays of any framework; DistributedOptimizer of ``pycoll.torch`` takes the
policies by name. ``average_gradients`` takes whole structures of arrays. ``Bucket`` gives direct
access to the flat memory.

``pycoll.local_updates`` averages parameters every few steps instead: ``LocalSGD``, ``SlowMo``
and ``DiLoCo`` wrap an optimizer of torch, and ``LocalUpdates`` serves arrays of any framework.
"""

from __future__ import annotations

from typing import Any

from pycoll.foreign_words import about_optimizer
from pycoll.gradients.average import average_gradients
from pycoll.gradients.buckets import Bucket
from pycoll.gradients.communication_plan import Gradient, Rate
from pycoll.gradients.compare import Comparison, Network, compare
from pycoll.gradients.layout import Entry
from pycoll.gradients.methods import METHODS, Method
from pycoll.gradients.policies import POLICIES, Policy
from pycoll.gradients.scheduler import Scheduler
from pycoll.local_updates.local_state import LocalState
from pycoll.local_updates.optimizers import DiLoCo, LocalSGD, SlowMo
from pycoll.local_updates.schedules import AdaComm, PostLocal
from pycoll.local_updates.updates import LocalUpdates

__all__ = [
    "METHODS",
    "POLICIES",
    "AdaComm",
    "Bucket",
    "Comparison",
    "DiLoCo",
    "Entry",
    "Gradient",
    "LocalSGD",
    "LocalState",
    "LocalUpdates",
    "Method",
    "Network",
    "Policy",
    "PostLocal",
    "Rate",
    "Scheduler",
    "SlowMo",
    "average_gradients",
    "compare",
]


def __getattr__(name: str) -> Any:
    raise AttributeError(f"module 'pycoll.optim' has no attribute {name!r}{about_optimizer(name)}")
