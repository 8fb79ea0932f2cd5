"""Local updates: ranks step by themselves, and average their parameters once in a while.

    inner steps of each rank        fragments of the parameters       outer step
    (any optimizer)           -->   are averaged over all ranks  -->  moves the parameters that
    as many as a schedule says      (one all_reduce of a list)        all ranks have in common

The modules, bottom up:

    schedules          the number of inner steps between synchronisations
    outer_step         the rule that moves the common parameters by the averaged change
    array_values       copies and conversions of arrays of any framework
    local_state        the state of a rank, and its form in a checkpoint
    levelling          ranks that begin, return or join take the state of the most advanced rank
    updates            LocalUpdates: all methods as functions of parameters and a state
    optimizers         LocalSGD, SlowMo and DiLoCo, which wrap an optimizer of torch
    torch_optimizer    the wrapper; the only module that needs torch

All methods are one: LocalSGD is the outer step with rate 1 and no momentum, which is the average
itself; SlowMo and DiLoCo have other outer steps. The functions of ``LocalUpdates`` never change
their arguments. If a collective fails, the caller still has the previous values.
"""
