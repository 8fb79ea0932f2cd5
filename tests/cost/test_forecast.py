"""``pycoll explain`` of machines that are not here: the model's times, quickly, and a picture."""

from __future__ import annotations

import re
import shlex
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from pycoll.cost.forecast import RANKS_MAX, Asked, forecast, select_columns, tables, with_links
from pycoll.cost.model import DEFAULT, Parameters
from pycoll.cost.selection import candidates, choose, predict, seconds_text
from pycoll.errors import InvalidArgumentError
from pycoll.schedule.collectives import Collective
from pycoll.schedule.topology import Topology
from pycoll.tools.cli import main

#: As the documents have it.
WORLD = ("--hosts", "128", "--local-size", "8", "--alpha", "2us", "--beta", "50GB/s")
FABRIC = with_links(DEFAULT, alpha=2e-6, beta=1 / 50e9)


@pytest.fixture(autouse=True)
def built_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """What this machine was measured to be does not matter here."""
    monkeypatch.setenv("PYCOLL_TUNING", "off")


def explained(*words: str, status: int = 0) -> str:
    done = CliRunner().invoke(main, ["explain", *words])
    assert done.exit_code == status, done.output
    return done.output


def table(text: str, head: str) -> dict[str, dict[str, str]]:
    """Name to column to time, of the table under ``head``; of what is chosen with a star."""
    lines = text[text.index(head) :].splitlines()
    columns = re.split(r" {2,}", lines[1].strip())
    rows = {}
    for line in lines[2:]:
        if not line.startswith("  "):
            break
        name = line.split()[0]
        cells = re.findall(r"[\d.e+]+ [a-z]+\*?|-", line.strip()[len(name) :])
        rows[name] = dict(zip(columns, cells, strict=True))
    return rows


def test_every_algorithm_has_the_time_that_the_selector_goes_by() -> None:
    topology = Topology.even(1024, 128)
    text = explained(*WORLD)
    assert "all_reduce of 1 MiB over 1024 ranks on 128 hosts" in text
    assert "across hosts: 2 us latency" in text and "50 GB/s" in text
    sizes = table(text, "all_reduce on 1024 ranks on 128 hosts of 8, predicted time by message")
    names = candidates(Collective.ALL_REDUCE, topology)
    assert set(sizes) == set(names) and len(names) > 10
    columns = {"8 B": 8, "1 MiB": 1 << 20, "1 GiB": 1 << 30}
    for column, nbytes in columns.items():
        chosen = choose(Collective.ALL_REDUCE, topology, nbytes, parameters=FABRIC).name
        for name in names:
            seconds = predict(Collective.ALL_REDUCE, name, topology, nbytes, FABRIC)
            star = "*" if name == chosen else ""
            assert sizes[name][column] == seconds_text(seconds) + star, (name, column)


def test_worlds_grow_up_to_the_largest_in_the_table_of_ranks() -> None:
    text = explained(*WORLD, "--bytes", "32K")
    ranks = table(text, "all_reduce of 32 KiB on hosts of 8, predicted time by ranks")
    columns = list(ranks["ring"])
    assert columns[0] == "8" and columns[-1] == str(RANKS_MAX) and "1024" in columns
    assert ranks["hierarchical"]["8"] == "-", "one host has no levels"
    for column in columns:
        size = int(column)
        topology = Topology.even(size, size // 8)
        seconds = predict(Collective.ALL_REDUCE, "tree", topology, 32 << 10, FABRIC)
        assert ranks["tree"][column].rstrip("*") == seconds_text(seconds)
    assert all(sum(row[c].endswith("*") for row in ranks.values()) == 1 for c in columns)


@pytest.mark.parametrize("kind", Collective, ids=lambda kind: kind.name.lower())
def test_the_largest_world_takes_seconds(kind: Collective) -> None:
    # Not the clock: others may compute next to the tests. Steps of all ranks would take minutes.
    start = time.process_time()
    found = forecast(Asked(kind, RANKS_MAX // 8, 8, 1 << 20), DEFAULT)
    assert time.process_time() - start < 60
    for by in (found.by_bytes, found.by_ranks):
        for times in by.values():
            assert times.chosen in times.of
            assert all(0 < seconds < 1e6 for seconds in times.of.values())
    assert max(found.by_ranks) == RANKS_MAX
    assert bool(found.by_bytes) == (kind is not Collective.BARRIER)


def test_links_that_are_given_count_and_others_stay() -> None:
    slow = with_links(DEFAULT, alpha=1e-3)
    assert slow.inside == DEFAULT.inside and slow.across.beta == DEFAULT.across.beta
    share = DEFAULT.across.overhead / DEFAULT.across.alpha
    assert slow.across.overhead == pytest.approx(share * 1e-3)
    assert with_links(DEFAULT, local_beta=1e-9).inside.beta == 1e-9
    assert with_links(DEFAULT) is DEFAULT

    def seconds(parameters: Parameters, kind: Collective, nbytes: int) -> float:
        return choose(kind, Topology.even(64, 64), nbytes, parameters=parameters).predicted_s

    barrier = [seconds(with_links(DEFAULT, alpha=a), Collective.BARRIER, 0) for a in (1e-6, 2e-6)]
    assert barrier[1] == pytest.approx(2 * barrier[0])
    rates = [with_links(DEFAULT, alpha=0.0, beta=b) for b in (1e-6, 2e-6)]
    long = [seconds(one, Collective.ALL_GATHER, 1 << 30) for one in rates]
    assert long[1] == pytest.approx(2 * long[0], rel=1e-3)


@pytest.mark.parametrize(
    ("words", "across"),
    [
        (("--alpha", "300ns", "--beta", "200Gb/s"), "300 ns latency, 75 ns per segment, 25 GB/s"),
        (("--alpha", "1.5 ms", "--beta", "40MB/s"), "1.5 ms latency, 375 us per segment, 0.04"),
        (("--beta", "1.6Tbit/s"), "8 us latency, 2 us per segment, 200 GB/s"),
        (("--beta", "25GB/s", "--rails", "4"), "8 us latency, 2 us per segment, 100 GB/s"),
        (
            ("--beta", "25GB/s", "--flow", "40Gb/s"),
            "8 us latency, 2 us per segment, 25 GB/s (5 from one rank)",
        ),
    ],
)
def test_times_and_rates_have_units(words: tuple[str, ...], across: str) -> None:
    text = explained("--hosts", "2", *words)
    assert f"across hosts: {across}" in text, text
    assert "inside hosts: 300 ns per call, 150 ns latency" in text


@pytest.mark.parametrize(
    ("words", "status", "why"),
    [
        (("--alpha", "2"), 2, "'2' is not a time such as 300ns, 2.5us or 1ms"),
        (("--bytes", "9999999999999T"), 2, "'9999999999999T' is more than 1024T"),
        (("--bytes", "9" * 400), 2, "is more than 1024T"),
        (("--bytes", "1P"), 2, "'1P' is not a number of bytes such as 8, 64K, 1M or 2G, up to"),
        (("--alpha", "-1us"), 2, "'-1us' is not a time"),
        (("--local-alpha", "11s"), 2, "'11s' is more than 10 s"),
        (("--beta", "25"), 2, "'25' is not a rate such as 25GB/s (bytes) or 200Gb/s (bits)"),
        (("--beta", "0GB/s"), 2, "'0GB/s' is not a finite rate above zero"),
        (("--local-beta", "1e-9s/B"), 2, "'1e-9s/B' is not a rate"),
        (("--local-size", "0"), 2, "x>=1"),
        (("--hosts", "2", "--local-size", "4", "--size", "6"), 1, "--size is 6, but 2 hosts of 4"),
        (("--hosts", "4096", "--local-size", "8"), 1, "32768 ranks; a forecast needs 2 to 16384"),
        (("--local-size", "1"), 1, "1 ranks; a forecast needs 2 to 16384"),
        (("--size", "7", "--hosts", "2", "--plot", "o.svg"), 1, "give --local-size"),
        (("--local-size", "4", "--plot", "o.bmp"), 1, "must end in one of .png, .pdf, .svg"),
        (("--local-size", "4", "--plot", "/nowhere/o.png"), 1, "is no file that can be written"),
        (("--hosts", "1", "--alpha", "1us", "--measured"), 1, "over its own links"),
    ],
)
def test_what_cannot_be_forecast_is_said(words: tuple[str, ...], status: int, why: str) -> None:
    assert why in " ".join(explained(*words, status=status).split())


def test_messages_up_to_the_bound_are_forecast() -> None:
    assert "all_reduce of 1024 TiB over 8 ranks" in explained("--bytes", "1024T")
    assert "all_reduce of 2 TiB over 8 ranks" in explained("--bytes", "2TiB")


def test_the_example_of_the_document_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib", reason="no matplotlib: pip install -r tests/requirements.txt")
    document = (Path(__file__).resolve().parents[2] / "docs" / "choice.md").read_text()
    found = re.findall(r"```sh\npycoll explain (.*)\n```", document)
    assert len(found) == 1
    monkeypatch.chdir(tmp_path)
    text = explained(*shlex.split(found[0]))
    assert "16 MiB over 1024 ranks on 128 hosts" in text
    assert (tmp_path / "world.svg").stat().st_size > 10_000
    for figure in ("8 us", "5 GB/s", "300 ns", "15 GB/s"):
        assert f"| {figure} |" in document or f" {figure} |" in document
    built_in = explained("--hosts", "2")
    assert "across hosts: 8 us latency" in built_in and ", 5 GB/s" in built_in
    assert "inside hosts: 300 ns per call, 150 ns latency" in built_in and ", 15 GB/s" in built_in


@pytest.mark.parametrize("ending", ["svg", "pdf", "png"])
def test_the_picture_has_the_best_algorithms_in_front(ending: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="no matplotlib: pip install -r tests/requirements.txt")
    picture = tmp_path / f"forecast.{ending}"
    text = explained("--hosts", "16", "--local-size", "4", "--plot", str(picture))
    assert f"picture: {picture}" in text
    assert picture.stat().st_size > 10_000
    if ending == "svg":
        drawn = picture.read_text()
        names = candidates(Collective.ALL_REDUCE, Topology.even(64, 16))
        shown = [name for name in names if f">{name}<" in drawn]
        # Those that are best somewhere have names, the others are counted.
        assert 2 <= len(shown) <= 6
        assert f">{len(names) - len(shown)} others<" in drawn
        assert ">chosen<" in drawn and ">best of all<" in drawn
        assert "ranks, 4 per host, 1 MiB" in drawn and "message size" in drawn


def test_a_barrier_has_ranks_only(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="no matplotlib: pip install -r tests/requirements.txt")
    picture = tmp_path / "barrier.svg"
    text = explained("barrier", "--hosts", "8", "--local-size", "2", "--plot", str(picture))
    assert "by message size" not in text
    assert "barrier on hosts of 2, predicted time by ranks" in text
    assert "message size" not in picture.read_text()


def test_tables_fit_100_columns() -> None:
    found = forecast(Asked(Collective.ALL_REDUCE, 128, 8, 1 << 20), FABRIC)
    assert max(map(len, tables(found))) <= 100


def test_columns_are_spread_and_keep_what_was_asked_for() -> None:
    assert select_columns([1, 2, 3], 2) == [1, 2, 3]
    values = [1 << power for power in range(12)]
    for kept in values:
        found = select_columns(values, kept)
        assert len(found) == 6 and found == sorted(found)
        assert {values[0], values[-1], kept} <= set(found)
    assert select_columns(values, 3) == select_columns(values, 1)


def test_a_forecast_of_one_rank_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="1 hosts of 1 are 1 ranks"):
        forecast(Asked(Collective.ALL_REDUCE, 1, 1, 8), DEFAULT)


def test_a_host_of_several_domains_needs_no_ranks() -> None:
    text = explained("--local-size", "64", "--domains", "8", "--bytes", "64K")
    assert "64 ranks on 1 host in 8 domains" in text
    assert "inside domains: 300 ns per call" in text and "across domains: 600 ns" in text
    assert "direct inside domains, " in text
    rows = table(text, "all_reduce on 64 ranks on 1 host of 64 with 8 domains, predicted time")
    assert any("*" in cell for name, row in rows.items() for cell in row.values() if ":" in name)
    assert "hierarchical" not in explained("--local-size", "64").split("\n\n")[0]
    text = explained("--size", "7", "--domains", "4", status=1)
    assert "domains is 4; it must be 1, or leave at least 2 of the 7 ranks" in text
