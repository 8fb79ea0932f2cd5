"""The methods of the survey by name, and what is said of words that name none."""

from __future__ import annotations

from typing import Any

import pytest

from pycoll.errors import InvalidArgumentError
from pycoll.gradients.chooser import decide
from pycoll.gradients.communication_plan import Gradient, Rate, Rates, Stage, check
from pycoll.gradients.methods import METHODS, method_of
from pycoll.gradients.policies import AUTO, POLICIES, Policy, comm_plan_of

RATES = Rates(*[Rate(1.0, 0.01)] * 3)


def test_the_table_has_the_survey_s_methods_and_every_policy() -> None:
    survey = ["BSP", "WFBP", "ByteScheduler"]
    wanted = {f"{name}-{kind}" for name in survey for kind in ("PS", "A2A")} | {"MG-WFBP"}
    assert wanted <= set(METHODS)
    assert {method.policy for method in METHODS.values()} == {*POLICIES, AUTO}
    for name, method in METHODS.items():
        for word in (name, name.lower(), name.upper()):
            found, architecture = method_of(word)
            assert found == Policy(method.policy)
            # The name of a policy leaves the architecture open.
            assert architecture == (None if word in (*POLICIES, AUTO) else method.architecture)


@pytest.mark.parametrize("architecture", [None, "a2a", "ps", "auto"])
def test_policies_take_any_architecture(architecture: str | None) -> None:
    assert method_of("wfbp", architecture) == (Policy("wfbp"), architecture)
    own = Policy("fixed", bucket_bytes=5)
    assert method_of(own, architecture) == (own, architecture)


@pytest.mark.parametrize(
    ("policy", "architecture", "text"),
    [
        ("bsp", "ring", "architecture is 'ring': expected one of a2a, ps, auto"),
        ("bsp", 3, "architecture is 3"),
        ("BSP-MPI", None, "'BSP-MPI': expected one of bsp, .*BSP-PS, .*ByteScheduler-A2A, auto"),
        (3, None, "policy is 3: expected a name or a pycoll.optim.Policy"),
        ("BSP-PS", "a2a", "that method has the architecture 'ps'; leave out one of the two"),
        ("dear", "ps", "policies for servers are bsp, wfbp, fixed, mg_wfbp, bytescheduler, auto"),
    ],
)
def test_wrong_words_are_refused(policy: Any, architecture: Any, text: str) -> None:
    with pytest.raises(InvalidArgumentError, match=text):
        method_of(policy, architecture)


def test_rates_without_servers_have_no_plans_for_them() -> None:
    gradients = [Gradient(100, 1.0)]
    with pytest.raises(InvalidArgumentError, match="architecture is 'ps': these rates have a2a;"):
        comm_plan_of(Policy("bsp"), gradients, RATES, "ps")
    check(comm_plan_of(Policy("bsp"), gradients, RATES, "a2a"), gradients)
    with pytest.raises(InvalidArgumentError, match="architecture is 'ps': these rates have a2a;"):
        decide(Policy("auto"), gradients, RATES, architecture="ps")
    with pytest.raises(InvalidArgumentError, match="'mesh': expected one of a2a, ps, auto"):
        decide(Policy("auto"), gradients, RATES, architecture="mesh")
    served = RATES._replace(push_pull=(Stage(Rate(1.0, 0.01)),))
    with pytest.raises(InvalidArgumentError, match="policy is 'dear' and architecture is 'ps'"):
        decide(Policy("dear"), gradients, served, architecture="ps")
