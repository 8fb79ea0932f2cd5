"""``pycoll tune``: the fit finds what is known, files are checked, and ranks agree on rank 0's."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from harness import ProcessWorld
from test_fit import KNOWN

import pycoll
from pycoll import _core
from pycoll.bootstrap import join_threads
from pycoll.comm import start_tuning
from pycoll.comm.communicator import Communicator
from pycoll.comm.operations import internals_of
from pycoll.comm.start_tuning import tuning_text
from pycoll.compress import Block
from pycoll.config import Config
from pycoll.cores import CpuQuota
from pycoll.cost import codec_rates, slot_stores, tuning_file
from pycoll.cost.codec_rates import CodecRate
from pycoll.cost.model import LINKS, Parameters
from pycoll.cost.tuning_file import BUILT_IN, Medium, Tuning
from pycoll.errors import InvalidArgumentError, PycollError
from pycoll.tools import explain
from pycoll.tools.cli import main
from pycoll.tools.info import facts
from pycoll.tools.tune import machine_links as bench_tune
from pycoll.tools.tune.fit import _CACHE_BYTES
from pycoll.tools.tune.machine_links import place_to_store

# The file

MINE = Tuning({"shm": Medium(KNOWN, 16384), "tcp": Medium(LINKS["tcp"])}, "test")


def stored(path: Path, values: Tuning = MINE, **changes: Any) -> Path:
    tuning_file.store(values, path, "2026-01-01")
    told = json.loads(path.read_text()) | changes
    path.write_text(json.dumps(told))
    return path


def changed_medium(**values: Any) -> dict[str, Any]:
    """The media of a file whose shm is changed; None takes an entry away."""
    media = tuning_file._media_as_json(MINE)
    shm = media["shm"] | values
    return {**media, "shm": {name: value for name, value in shm.items() if value is not None}}


def test_a_file_gives_back_what_was_stored(tmp_path: Path) -> None:
    found = tuning_file.load(stored(tmp_path / "deep" / "tuning.json"))
    assert found.media == MINE.media
    assert "2026-01-01" in found.origin
    assert tuning_file.from_text(found.to_text()) == found
    for stores in ("ordinary", "streaming", None):
        found = tuning_file.load(stored(tmp_path / "b.json", MINE._replace(slot_stores=stores)))
        assert found.slot_stores == stores
        assert tuning_file.from_text(found.to_text()) == found
        assert slot_stores.slot_stores_of(found.to_text()) == (stores or "streaming")
    assert BUILT_IN.to_text() == ""
    assert tuning_file.from_text("") is BUILT_IN


def test_rates_of_codecs_are_kept_and_those_that_lack_are_built_in(tmp_path: Path) -> None:
    mine = CodecRate("int8", 1.23456789e9, 2.5e9 / 3)
    told = {"int8": {"encode": mine.encode, "decode_add": mine.decode_add}}
    found = tuning_file.load(stored(tmp_path / "tuning.json", codecs=told))
    known = {one.name: one for one in found.codecs}
    assert known == {one.name: one for one in codec_rates.BUILT_IN} | {"int8": mine}
    assert tuning_file.from_text(found.to_text()) == found
    assert tuning_file.load(stored(tmp_path / "b.json", found)).codecs == found.codecs
    for several in (False, True):
        assert found.parameters(several_hosts=several).codecs == found.codecs
    assert tuning_file.load(stored(tmp_path / "c.json", codecs={})).codecs == codec_rates.BUILT_IN


@pytest.mark.parametrize("field", ["made", "media", "networks", "slot_stores", "codecs"])
def test_a_file_that_lacks_a_field_is_refused(tmp_path: Path, field: str) -> None:
    path = stored(tmp_path / "tuning.json")
    told = json.loads(path.read_text())
    del told[field]
    path.write_text(json.dumps(told))
    with pytest.raises(InvalidArgumentError, match=f"it lacks {field}; run pycoll tune"):
        tuning_file.load(path)


@pytest.mark.parametrize("figure", sorted(MINE.media["shm"].link._fields))
def test_a_file_that_lacks_a_figure_of_a_link_is_refused(tmp_path: Path, figure: str) -> None:
    path = stored(tmp_path / "tuning.json", media=changed_medium(**{figure: None}))
    with pytest.raises(InvalidArgumentError, match=r"shm must have alpha, .*; run pycoll tune"):
        tuning_file.load(path)


def test_a_file_of_schema_1_is_refused_and_the_text_says_what_to_run(tmp_path: Path) -> None:
    """The edition before wrote schema 1, without slot_stores, codecs and later figures of links."""
    path = stored(tmp_path / "old.json", schema=1)
    old = json.loads(path.read_text())
    del old["codecs"], old["slot_stores"]
    for medium in old["media"].values():
        del medium["flow"], medium["reach"], medium["sustained"], medium["call"]
    path.write_text(json.dumps(old))
    with pytest.raises(
        InvalidArgumentError, match="its schema is 1, expected 2; run pycoll tune"
    ) as caught:
        tuning_file.find(Config(tuning=str(path)))
    assert str(path) in str(caught.value)


def test_whatever_size_spilling_begins_at_is_found_again(tmp_path: Path) -> None:
    for size in _CACHE_BYTES:
        path = stored(tmp_path / "tuning.json", media=changed_medium(cache_bytes=size))
        assert tuning_file.find(Config(tuning=str(path))).media["shm"].link.cache_bytes == size


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"schema": 3}, "its schema is 3, expected 2"),
        ({"schema": None}, "its schema is None"),
        ({"machine": "somewhere"}, "made on machine 'somewhere', and this is"),
        ({"media": None}, "media must be shm, tcp"),
        ({"media": {"shm": {}}}, "media must be shm, tcp"),
        ({"media": changed_medium(alpha=None)}, "shm must have alpha, beta"),
        ({"media": changed_medium(more=1)}, "shm must have alpha, beta"),
        ({"media": changed_medium(alpha=-1.0)}, "shm.alpha is -1.0: expected 1e-10 to 10"),
        ({"media": changed_medium(beta="fast")}, "shm.beta is 'fast': expected a number"),
        ({"media": changed_medium(beta=True)}, "shm.beta is True: expected a number"),
        ({"media": changed_medium(gamma=float("nan"))}, "shm.gamma is nan"),
        ({"media": changed_medium(segment_bytes=5000)}, "shm.segment_bytes is 5000: expected a"),
        ({"media": changed_medium(segment_bytes=1 << 17)}, "from 4096 to 65536"),
        ({"media": changed_medium(segment_bytes=4096.0)}, "expected a whole number"),
        ({"media": changed_medium(cache_bytes=0)}, "shm.cache_bytes is 0"),
        ({"slot_stores": "quick"}, "slot_stores is 'quick': expected one of ordinary, streaming"),
        ({"slot_stores": True}, "slot_stores is True: expected one of ordinary, streaming"),
        ({"codecs": None}, "codecs must have some of bf16, fp8, int4, int8"),
        ({"codecs": ["int8"]}, "codecs must have some of bf16, fp8, int4, int8"),
        ({"codecs": {"int9": {}}}, "codecs must have some of bf16"),
        ({"codecs": {"int8": {"encode": 1e9}}}, "codecs.int8 must have encode and decode_add"),
        (
            {"codecs": {"sign": {"encode": 0.0, "decode_add": 1e9}}},
            "codecs.sign.encode is 0.0: expected bytes per second from 1000 to 1e+15",
        ),
        (
            {"codecs": {"sign": {"encode": 1e9, "decode_add": True}}},
            "codecs.sign.decode_add is True: expected bytes",
        ),
    ],
)
def test_a_file_that_is_not_right_is_refused_with_the_reason(
    tmp_path: Path, changes: dict[str, Any], why: str
) -> None:
    path = stored(tmp_path / "tuning.json", **changes)
    with pytest.raises(InvalidArgumentError, match=re.escape(why)) as caught:
        tuning_file.find(Config(tuning=str(path)))
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b"{}" + b" " * 70000])
def test_a_broken_file_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "tuning.json"
    path.write_bytes(content)
    with pytest.raises(InvalidArgumentError, match=r"cannot be used: .*run pycoll tune"):
        tuning_file.find(Config(tuning=str(path)))
    with pytest.raises(InvalidArgumentError, match="No such file"):
        tuning_file.find(Config(tuning=str(tmp_path / "other.json")))


def test_the_machines_own_file_is_found_and_a_broken_one_only_warned_about(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert tuning_file.find(Config()) is BUILT_IN
    path = tuning_file.default_path()
    assert path == tmp_path / "pycoll" / f"{tuning_file.fingerprint()}.json"
    stored(path)
    assert tuning_file.find(Config()).media == MINE.media
    assert tuning_file.find(Config(tuning="off")) is BUILT_IN
    path.write_text("{")
    with pytest.warns(UserWarning, match=r"cannot be used.*built-in values are used"):
        assert tuning_file.find(Config()) is BUILT_IN


def test_a_quota_has_a_file_of_its_own_and_a_bound_rank_that_of_its_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def under(quota: float | None) -> str:
        found = None if quota is None else CpuQuota("group", quota)
        monkeypatch.setattr(tuning_file, "cpu_quota", lambda: found)
        tuning_file.fingerprint.cache_clear()
        return tuning_file.fingerprint()

    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    try:
        alone = under(None)
        assert under(8.0) == under(9.0) == alone
        assert len({alone, under(4.0), under(1.5), under(0.5)}) == 4
        path = stored(tmp_path / "tuning.json")
        assert under(0.5) == json.loads(path.read_text())["machine"]
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3})
        assert under(None) == alone
        with pytest.raises(InvalidArgumentError, match=r"made on machine .*; run pycoll tune"):
            tuning_file.load(path)
    finally:
        tuning_file.fingerprint.cache_clear()


def test_a_relative_cache_folder_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")
    monkeypatch.setenv("HOME", "/somewhere")
    path = tuning_file.default_path()
    assert path is not None
    assert path.parent == Path("/somewhere/.cache/pycoll")


def test_storing_that_fails_leaves_the_old_file_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = stored(tmp_path / "tuning.json")
    before = path.read_bytes()

    def fail(*_: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        tuning_file.store(BUILT_IN, path, "later")
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


# Agreement


def other(path: Path) -> Path:
    """A file whose values choose differently."""
    slow = KNOWN._replace(alpha=1e-3, beta=1e-12)
    return stored(path, Tuning({**MINE.media, "shm": Medium(slow, 4096)}, "other"))


def test_all_ranks_use_the_values_of_rank_0(tmp_path: Path) -> None:
    told = {"int8": {"encode": 1.5e9, "decode_add": 2.5e9}}
    first, second = stored(tmp_path / "a.json", codecs=told), other(tmp_path / "b.json")
    configs = [Config(tuning=name) for name in (str(first), str(second), "off", "/no/file")]
    joined_all = join_threads(4, configs, bring=tuning_text)
    comms = [
        Communicator(joined, config, "test")
        for joined, config in zip(joined_all, configs, strict=True)
    ]
    try:
        known = Parameters(inside=KNOWN).with_ranks_per_core(joined_all[0].oversubscription)
        for comm in comms:
            parameters = internals_of(comm).compiler.plans.parameters
            assert parameters.inside == known.inside
            assert parameters.segment_bytes == 16384
            assert str(first) in comm.explain("all_reduce", 1 << 20)
            text = comm.explain("all_reduce", 1 << 20, Block("int8"))
            assert "encodes 1.5 GB/s, decodes and adds 2.5 GB/s (measured)" in text
        for nbytes in (8, 1 << 14, 1 << 22):
            assert len({comm.choice("all_reduce", nbytes) for comm in comms}) == 1
        works = [comm.all_reduce(float(comm.rank), async_op=True) for comm in comms]
        assert [work.wait() for work in works] == [6.0] * 4
    finally:
        for comm in comms:
            comm.close()


def chosen(comm: pycoll.Communicator) -> tuple[list[str], float]:
    """What a rank chooses for some sizes, and the sum of all ranks' numbers."""
    sizes = (8, 1 << 14, 1 << 20)
    x = np.full(1 << 18, comm.rank + 1.0, np.float32)
    return [comm.choice("all_reduce", n) for n in sizes], float(comm.all_reduce(x)[-1])


def test_processes_with_different_files_choose_alike(tmp_path: Path) -> None:
    files = [str(stored(tmp_path / "a.json")), str(other(tmp_path / "b.json"))]
    first, second = ProcessWorld(2, chosen, tuning=files).outcomes()
    assert first == second
    assert first[1] == 3.0


def test_a_file_of_rank_0_that_is_of_no_use_stops_all_ranks(tmp_path: Path) -> None:
    path = stored(tmp_path / "a.json", schema=9)
    with pytest.raises(PycollError, match="its schema is 9, expected 2"):
        join_threads(3, [Config(tuning=str(path)), Config(), Config()], bring=tuning_text)


def stores_of(comm: pycoll.Communicator) -> tuple[str, str, float]:
    """The stores of a communicator and of a part of it, and a sum that passed through slots."""
    part = comm.split(0)
    assert part is not None
    with part:
        tunings = [internals_of(one).joined.tuning for one in (part, comm)]
        stores = [slot_stores.slot_stores_of(text) for text in tunings]
        assert stores[0] == stores[1]
        x = part.all_reduce(np.full(1 << 16, comm.rank + 1.0, np.float32))
    text = comm.explain("all_reduce", 1 << 20)
    return stores[1], text.splitlines()[-1].strip(), float(x[-1])


@pytest.mark.parametrize("stores", slot_stores.KINDS)
def test_all_ranks_fill_slots_by_the_stores_of_rank_0(tmp_path: Path, stores: str) -> None:
    mine, others = (
        MINE._replace(slot_stores=one)
        for one in (stores, "streaming" if stores == "ordinary" else "ordinary")
    )
    files = [str(stored(tmp_path / f"{one.slot_stores}.json", one)) for one in (mine, others)]
    outcomes = ProcessWorld(2, stores_of, tuning=files).outcomes()
    assert outcomes == [(stores, f"slots      filled by {stores} stores", 3.0)] * 2


def test_without_a_file_the_stores_are_measured_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    start_tuning.measured_stores.cache_clear()
    limits: list[float] = []
    times = iter([{"ordinary": 2.0, "streaming": 1.0, "string": 3.0}])

    def measure(limit_s: float) -> dict[str, float]:
        limits.append(limit_s)
        return next(times)

    monkeypatch.setattr(_core, "time_stores", measure)
    monkeypatch.setattr(start_tuning, "core_count", lambda: 2)
    try:
        assert start_tuning.start_tuning(Config(tuning="off")) is BUILT_IN
        for _ in range(2):
            found = tuning_file.from_text(tuning_text(Config()))
            assert found == BUILT_IN._replace(slot_stores="streaming")
        assert limits == [start_tuning.MEASURING_S] and limits[0] < 5e-3
        monkeypatch.delenv("PYCOLL_TUNING", raising=False)
        shm = dict(facts())["transport shm"]
        assert shm.startswith("built; fills slots by streaming stores, measured just now")
        path = stored(tmp_path / "a.json", MINE._replace(slot_stores="ordinary"))
        monkeypatch.setenv("PYCOLL_TUNING", str(path))
        assert f"ordinary stores, from {path}" in dict(facts())["transport shm"]
    finally:
        start_tuning.measured_stores.cache_clear()


@pytest.mark.parametrize(
    ("times", "stores"),
    [
        ((1.0, 2.0, 3.0), "ordinary"),
        ((2.0, 1.0, 3.0), "streaming"),
        ((3.0, 2.0, 1.0), "string"),
        ((3.0, 1.0, 1.2), "string"),
    ],
)
def test_the_fastest_stores_are_chosen_and_string_ones_where_they_come_close(
    monkeypatch: pytest.MonkeyPatch, times: tuple[float, ...], stores: str
) -> None:
    found: list[Any] = [dict(zip(slot_stores.KINDS, times, strict=True)), None]
    monkeypatch.setattr(_core, "time_stores", lambda _: found.pop(0))
    monkeypatch.setattr(start_tuning, "core_count", lambda: 2)
    try:
        for expected in (stores, None):
            start_tuning.measured_stores.cache_clear()
            assert start_tuning.measured_stores() == expected
    finally:
        start_tuning.measured_stores.cache_clear()


def test_a_process_with_one_core_or_a_quota_of_one_times_no_stores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_core, "time_stores", lambda _: pytest.fail("timed"))
    monkeypatch.setattr(start_tuning, "core_count", lambda: 1)
    start_tuning.measured_stores.cache_clear()
    try:
        assert start_tuning.measured_stores() is None
    finally:
        start_tuning.measured_stores.cache_clear()


def test_the_kinds_of_stores_are_those_of_the_engine() -> None:
    times = None
    for _ in range(100):  # busy cores may keep it from measuring
        times = times or _core.time_stores(0.02)
    assert times is None or list(times) == sorted(slot_stores.KINDS)
    with pytest.raises(ValueError, match="no such kind of stores"):
        _core.ShmTransport(0, 1).use_stores("both")


def test_what_rank_0_tells_is_checked() -> None:
    values = MINE._replace(slot_stores="ordinary").to_text()
    wrong = values.replace('"ordinary"', '"both"')
    assert wrong != values
    for text in ("{", "[]", '{"media": {}, "origin": ""}', '{"origin": ""}', wrong):
        assert slot_stores.slot_stores_of(text) == "streaming"
        with pytest.raises(InvalidArgumentError, match="rank 0 sent a tuning"):
            tuning_file.from_text(text)


def pass_of(**seconds: float) -> dict[str, bench_tune.Times]:
    """Times of two cases for each option."""
    cases = [bench_tune.Case("ALL_REDUCE", "ring", 2, nbytes, 65536) for nbytes in (64, 128)]
    return {word: {case: s * case.nbytes for case in cases} for word, s in seconds.items()}


def test_options_are_compared_inside_each_pass() -> None:
    best = bench_tune.best_option
    # Cores moved in the second pass: "other" has the shortest time of all, and loses twice.
    moved = [
        pass_of(usual=1.0, other=1.2),
        pass_of(usual=0.5, other=0.4),
        pass_of(usual=1, other=3),
    ]
    assert best(moved, "usual") == "usual"
    assert best(moved[1:2], "usual") == "other"
    assert best([pass_of(usual=1.0, other=0.9)], "usual") == "other"
    assert best([pass_of(usual=1.0, other=0.98)], "usual") == "usual"
    assert best([pass_of(usual=1.0, other=0.9)], "usual", 0.8) == "usual"
    assert best([pass_of(usual=1.0, other=0.7)], "usual", 0.8) == "other"


def test_of_three_passes_the_median_counts() -> None:
    passes = [pass_of(one=s)["one"] for s in (3.0, 1.0, 2.0)]
    assert list(bench_tune.medians(passes).values()) == [128.0, 256.0]


def test_segments_follow_the_medium_that_is_used() -> None:
    values = Tuning({"shm": Medium(KNOWN, 16384), "tcp": Medium(LINKS["tcp"], 32768)}, "test")
    assert values.parameters("shm").segment_bytes == 16384
    assert values.parameters("tcp").segment_bytes == 32768
    assert values.parameters("tcp").inside == LINKS["tcp"]
    assert values.parameters("shm", several_hosts=True).segment_bytes == 32768


def test_a_network_is_not_taken_to_be_faster_than_this_machine_or_the_built_in_one() -> None:
    known = LINKS["tcp"]
    for alpha, beta in ((known.alpha / 4, known.beta * 3), (known.alpha * 2, known.beta / 3)):
        link = known._replace(alpha=alpha, beta=beta)
        found = Tuning({**MINE.media, "tcp": Medium(link)}, "test").parameters()
        assert found.across.alpha == max(alpha, known.alpha)
        assert found.across.beta == max(beta, known.beta)


def test_children_of_a_split_keep_the_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYCOLL_TUNING", str(stored(tmp_path / "a.json")))
    (comm,) = pycoll.local_world(1)
    monkeypatch.setenv("PYCOLL_TUNING", "off")
    with comm:
        child = comm.split(0)
        assert child is not None
        with child:
            found, given = (internals_of(one).compiler.plans.parameters for one in (child, comm))
            assert found == given
            assert found.inside == KNOWN


# The command


def test_tune_stores_what_explain_then_uses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYCOLL_TUNING")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    before = CliRunner().invoke(main, ["explain", "all_reduce", "--size", "2"])
    assert "values: built in" in before.output
    done = CliRunner().invoke(main, ["tune", "--quick", "--transport", "shm"])
    assert done.exit_code == 0, done.output
    path = tuning_file.default_path()
    assert path is not None
    assert f"stored in {path}" in done.output
    kind = tuning_file.load(path).slot_stores
    assert f"shm        fills slots by {kind} stores" in done.output
    assert re.search(r"shm +.*[\d.]+ \w+ latency, .* per segment of \d+ KiB", done.output)
    for collective in ("all_reduce", "broadcast", "all_gather", "reduce_scatter"):
        assert re.search(rf"{collective}: half of \d+ predictions .* within \d+%", done.output)
    assert tuning_file.load(path).media["tcp"] == BUILT_IN.media["tcp"]
    assert not set(tuning_file.load(path).codecs) & set(codec_rates.BUILT_IN)
    assert re.search(r"codecs +bf16: encodes [\d.]+ GB/s, decodes and adds", done.output)
    arguments = ["explain", "all_reduce", "--size", "2", "--bytes", "64K", "--measured"]
    after = CliRunner().invoke(main, arguments)
    assert after.exit_code == 0, after.output
    assert f"values: {path}" in after.output
    assert dict(facts())["costs of links"].startswith(str(path))
    assert f"fills slots by {kind} stores, from {path}" in dict(facts())["transport shm"]
    rows = re.findall(r"^ +(\d+) +[\d.]+ \w+ +[\d.]+ \w+ +[\d.]+  \w+$", after.output, re.M)
    assert [int(row) for row in rows] == [64, 256, 1024, 4096, 16384, 65536]


def test_predictions_to_be_measured_know_of_cores_that_ranks_share(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(explain, "core_count", lambda: 2)
    told: list[Parameters] = []

    def measure(*words: object) -> Iterator[str]:
        told.extend(word for word in words if isinstance(word, Parameters))
        yield "measured"

    monkeypatch.setattr(bench_tune, "comparison_lines", measure)
    words = ["explain", "all_reduce", "--size", "8", "--bytes", "1M"]
    elsewhere, here = (CliRunner().invoke(main, [*words, *more]) for more in ([], ["--measured"]))
    assert elsewhere.exit_code == here.exit_code == 0, here.output
    assert "per core" not in elsewhere.output
    assert "values: built in, 4 ranks per core" in here.output
    assert told == [Parameters().with_ranks_per_core(4)]
    alone = CliRunner().invoke(main, ["explain", "--size", "2", "--measured"])
    assert "per core" not in alone.output and told[1] == Parameters()


def test_what_is_measured_is_stored_in_folders_that_are_made(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "table.json"
    assert place_to_store(path) == path and path.parent.is_dir() and not path.exists()
    said = CliRunner().invoke(main, ["tune", "--help"]).output
    assert "missing folders are made" in " ".join(said.split())


def test_tune_says_what_it_cannot_do(tmp_path: Path) -> None:
    done = CliRunner().invoke(main, ["tune", "--output", str(tmp_path)])
    assert done.exit_code == 1
    assert "is no file that can be written" in done.output
    done = CliRunner().invoke(main, ["tune", "--transport", "ib"])
    assert done.exit_code == 2
    done = CliRunner().invoke(main, ["explain", "all_reduce", "--hosts", "2", "--measured"])
    assert done.exit_code == 1
    assert "--measured needs" in done.output
