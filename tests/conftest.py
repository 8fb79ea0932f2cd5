"""For all tests: what it takes to replay a failure is printed, and nothing outside matters.

Hypothesis prints its own; ``--hypothesis-profile=long`` tries more. TEST_SEED shifts the seeds of
the other random tests. No test may take longer than pytest's timeout; a little before it, all
threads' stacks are printed.
"""

from __future__ import annotations

import gc
import itertools
import os
import signal
import time
from collections.abc import Generator

import pytest
from hypothesis import HealthCheck, settings

_COMMON = {
    "deadline": None,
    "database": None,
    "print_blob": True,
    "suppress_health_check": [HealthCheck.too_slow],
}
settings.register_profile("ci", max_examples=60, **_COMMON)
settings.register_profile("long", max_examples=500, **_COMMON)
settings.load_profile("ci")

# A job's variables around the tests would make worlds of their own.
for _name in [name for name in os.environ if name.startswith("PYCOLL_")]:
    del os.environ[_name]
# Where Python does not gather what print() writes, ranks that share a pipe tear each other's lines.
os.environ.pop("PYTHONUNBUFFERED", None)
# Choices are tested with the built-in values, whatever this machine was measured to be.
os.environ["PYCOLL_TUNING"] = "off"

# Background jobs of a shell ignore SIGINT, and those of nohup SIGHUP, as would the processes that
# tests start and interrupt. What has a handler here has the default again after exec.
for _signum in (signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(_signum) == signal.SIG_IGN:
        signal.signal(_signum, lambda *_: None)

SEED = os.environ.get("TEST_SEED", "0")

#: Where most seconds are spent. They are started first, so that no worker is left with one of them
#: when the others are through.
LONG_FILES = (
    "test_soak.py",
    "test_bench_net.py",
    "test_horovod.py",
    "test_distributed.py",
    "test_torch_scripts.py",
    "test_vanish.py",
    "test_algorithms.py",
    "test_fake.py",
    "test_agents.py",
    "test_site.py",
    "test_shrink_processes.py",
    "test_docs.py",
    "test_compiled_torch.py",
    "test_bench_scripts.py",
    "test_scheduler.py",
    "test_search.py",
    "test_launch.py",
    "test_hosts.py",
    "test_function_runs.py",
    "test_tune_hosts.py",
    "test_guilty_rank.py",
)


def pytest_report_header() -> str:
    return f"seeds: TEST_SEED={SEED}; {len(os.sched_getaffinity(0))} usable cores"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {name: place for place, name in enumerate(LONG_FILES)}
    items.sort(key=lambda item: places.get(item.path.name, len(places)))


def pytest_collection_finish() -> None:
    """Take what all tests share from the garbage collector.

    It would look at every object of 8,000 tests and of their imports in each full collection, and
    many tests ask for one.
    """
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        report.sections.append(("seed", f"TEST_SEED={SEED}"))
    return report


@pytest.fixture
def nothing_is_left() -> Generator[None]:
    """Joining leaves no thread and no descriptor."""
    # Imported late: the settings of pycoll are cleared above.
    from joining import footprint

    from pycoll.bootstrap.deadline import Deadline

    gc.collect()
    before = footprint()
    yield
    gc.collect()
    deadline = Deadline(5)
    while footprint() != before and not deadline.passed():
        time.sleep(0.02)
    assert footprint() == before, "threads or descriptors are left"


@pytest.fixture
def as_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that take each other for processes, so that they really pass descriptors."""
    from pycoll.bootstrap.discovery import identity

    counter = itertools.count()
    monkeypatch.setattr(identity, "process_token", lambda: f"process {next(counter)}")
