"""Gradients reduced beside the backward pass, in messages that a policy makes.

    gradients in the order     agenda: messages in the order     spans of memory, each
    of the backward pass  -->  in which all ranks send them  --> handed to the progress
    sizes, times, rates        (policies, choose; pure)          thread when it is whole
                                                                 (layout, scheduler)

A step's gradients come one after the other. To send each by itself pays a start for every one of
them; to send all as one wastes the time of the backward pass. ``agenda`` has the words,
``policies`` the known ways in between by name, ``simulate`` says how long a step takes with any of
them, ``choose`` takes the best, ``measure`` finds what messages cost, and ``scheduler`` runs it.

An agenda is a function of values that are alike on all ranks, so ranks never ask each other what to
send next: a message goes when its gradients are there and all messages in front of it have gone.

All policies give the same bits. Every sum is folded in rank order (``deterministic=True`` of the
collectives, whose algorithms are those that fold so), which depends neither on where a value lies
in a message nor on which algorithm of those runs; reduce_scatter folds alike. On one host that
costs nothing where the fastest algorithms fold so anyway; between hosts it excludes those that
combine inside hosts first, and ``deterministic=False`` has those back.

``Scheduler`` serves arrays of any framework; ``pycoll.torch``'s DistributedOptimizer takes its
policies by name. ``average_gradients`` takes whole structures of arrays. ``Bucket`` is for those
who want the flat memory itself.
"""

from __future__ import annotations

from pycoll.optim.average import average_gradients
from pycoll.optim.bucket import Bucket
from pycoll.optim.layout import Entry
from pycoll.optim.policies import POLICIES, Policy
from pycoll.optim.scheduler import Scheduler

__all__ = ["POLICIES", "Bucket", "Entry", "Policy", "Scheduler", "average_gradients"]
