"""pycoll.torch as Horovod's programs use it, on 1 to 4 ranks of real processes."""

from __future__ import annotations

import functools
from types import ModuleType

import hvd_alone_checks
import hvd_bad_input_checks
import hvd_deferred_step_checks
import hvd_elastic_checks
import hvd_moving_checks
import hvd_optimizer_checks
import hvd_policy_checks
import hvd_reducing_checks
import hvd_storages_checks
import pytest
from torch_ranks import checks_of, outcomes_of

MODULES = {
    one.__name__: one
    for one in (
        hvd_alone_checks,
        hvd_bad_input_checks,
        hvd_elastic_checks,
        hvd_moving_checks,
        hvd_optimizer_checks,
        hvd_deferred_step_checks,
        hvd_policy_checks,
        hvd_reducing_checks,
        hvd_storages_checks,
    )
}
#: When a parameter steps is a matter of each rank and its own program, so a fourth rank adds time
#: and nothing else.
SIZES = dict.fromkeys(MODULES, (1, 2, 3, 4)) | {
    hvd_deferred_step_checks.__name__: (1, 2, 3),
    hvd_alone_checks.__name__: (1, 2, 3),
    hvd_elastic_checks.__name__: (1, 3),
}
CASES = [
    (name, check, size)
    for name, module in MODULES.items()
    for check in checks_of(module)
    for size in SIZES[name]
]


@functools.cache
def outcomes(module: str, size: int) -> dict[str, str]:
    found: ModuleType = MODULES[module]
    return outcomes_of(size, found, checks_of(found))


@pytest.mark.parametrize(("module", "check", "size"), CASES)
def test_check(module: str, check: str, size: int) -> None:
    failures = outcomes(module, size)[check]
    assert not failures, failures
