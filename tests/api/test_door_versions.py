"""A door: the switch, the oldest tested version, the self-test, and one warning."""

from __future__ import annotations

import sys
import types
import warnings
from collections.abc import Callable

import pytest

from pycoll.doors import Door, expect


def said(
    monkeypatch: pytest.MonkeyPatch,
    version: str | None,
    test: Callable[[], None],
    tested: tuple[str, ...] = ("2.13.0", "2.14.1"),
) -> tuple[bool, list[str]]:
    """Whether the door opens, three times alike, and the texts of its warnings."""
    library = types.ModuleType("some_library")
    if version is not None:
        library.__version__ = version  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "some_library", library)
    door = Door("parts", test, "Nothing happens.", "some_library", tested, "mpi_watch")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = {door.is_open() for _ in range(3)}
    assert len(found) == 1 and all(one.category is RuntimeWarning for one in told)
    return found.pop(), [str(one.message) for one in told]


def fail() -> None:
    expect(False, "a name is missing")


@pytest.mark.parametrize(
    "version",
    ["2.13.0", "2.13.0a0+git1234", "2.13", "2.14.1", "2.13.7", "2.99.0+cpu", "10.0", None],
)
def test_a_version_from_the_oldest_tested_one_on_is_tested(
    version: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Newer versions that no test has run with are among them."""
    assert said(monkeypatch, version, lambda: None) == (True, [])
    opened, told = said(monkeypatch, version, fail)
    assert not opened and len(told) == 1
    named = "some_library" if version is None else f"some_library {version}"
    assert told[0] == (
        f"parts are off, since their self-test fails with {named} (RuntimeError: a name is "
        "missing); tested versions: 2.13.0, 2.14.1. Nothing happens."
    )


@pytest.mark.parametrize("version", ["2.12.9", "2.12", "1.99.0", "2.9.1+cu130"])
def test_an_older_version_is_off_without_a_self_test(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[int] = []
    opened, told = said(monkeypatch, version, lambda: ran.append(1))
    assert not opened and not ran
    assert told == [
        f"parts are off, since some_library {version} is too old; tested versions: 2.13.0, 2.14.1. "
        "Nothing happens."
    ]


def test_a_feature_without_private_names_has_no_oldest_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert said(monkeypatch, "0.1", lambda: None, ()) == (True, [])
    opened, told = said(monkeypatch, "0.1", fail, ())
    assert not opened and "tested versions" not in told[0]


def test_a_switch_that_is_off_tests_and_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYCOLL_MPI_WATCH", "0")
    ran: list[int] = []
    assert said(monkeypatch, "2.12.0", lambda: ran.append(1)) == (False, [])
    assert not ran


def test_where_warnings_are_errors_the_door_stays_closed() -> None:
    door = Door("parts", fail, "Nothing happens.", "some_library", ())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeWarning, match="self-test"):
            door.is_open()
        assert not door.is_open()
