"""The proof is tested: damaged schedules and plans are refused, or do no harm in a simulation.

The share of mutants that are refused is held up too, so that the mutations bite; and parts of the
proof are switched off to see that the mutants then get through.
"""

from __future__ import annotations

import pytest
from mutants import SEED, judge_plans, judge_schedules, plan_mutants
from samples import all_samples
from simulate import plans_are_right

from pycoll.plan.lowering import add_acknowledgements
from pycoll.plan.verifier import PlanVerifier, verify_plans
from pycoll.schedule.language import ScheduleError

SAMPLES = [pair for size in (2, 3, 4, 5) for pair in all_samples(size)]


def test_schedule_mutants_are_refused_or_harmless() -> None:
    tried, refused = 0, 0
    for name, schedule in SAMPLES:
        one = judge_schedules(name, schedule)
        tried, refused = tried + one[0], refused + one[1]
    print(f"seed {SEED}: {refused} of {tried} damaged schedules were refused")
    assert tried >= 2000
    assert refused * 10 >= tried * 7


def test_plan_mutants_are_refused_or_harmless() -> None:
    tried, refused = 0, 0
    for name, schedule in SAMPLES:
        one = judge_plans(name, add_acknowledgements(schedule))
        tried, refused = tried + one[0], refused + one[1]
    print(f"seed {SEED}: {refused} of {tried} damaged plans were refused")
    assert tried >= 3000
    assert refused * 10 >= tried * 7


def test_most_of_the_refused_plans_go_wrong_when_run() -> None:
    wrong, refused = 0, 0
    for name, schedule in SAMPLES:
        for number, (_, plans) in enumerate(list(plan_mutants(name, schedule))[::7]):
            try:
                verify_plans(plans)
            except ScheduleError:
                refused += 1
                try:
                    wrong += not plans_are_right(plans, number, runs=6)
                except ScheduleError:
                    wrong += 1
    print(f"seed {SEED}: {wrong} of {refused} refused plans go wrong in six runs")
    assert wrong * 10 >= refused * 7


@pytest.mark.parametrize(
    "part",
    ["_check_write", "_check_end", "_check_outputs", "_check_waits", "_check_direct_write"],
)
def test_without_a_part_of_the_proof_mutants_slip_through(
    part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The canary: a hole in the proof does fail these tests.

    The mutant that gets through is among those that the whole proof refuses above.
    """
    monkeypatch.setattr(PlanVerifier, part, lambda *arguments: None)
    with pytest.raises(pytest.fail.Exception, match="runs go wrong"):
        for name, schedule in SAMPLES:
            judge_plans(name, add_acknowledgements(schedule))
