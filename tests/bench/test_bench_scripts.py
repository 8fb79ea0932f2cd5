"""The commands in bench/: each runs small, says what it promises, and keeps to its section."""

from __future__ import annotations

import platform
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from harness import ROOT

from pycoll import _core
from pycoll.errors import InvalidArgumentError
from pycoll.optim import POLICIES
from pycoll.types import OPS

BENCH = ROOT / "bench"


def run(script: str, *arguments: str) -> str:
    line = [sys.executable, str(BENCH / script), *arguments]
    done = subprocess.run(
        line, capture_output=True, text=True, timeout=280, check=False, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def page(tmp_path: Path) -> Path:
    """A page of results on which other sections stand already."""
    path = tmp_path / "RESULTS.md"
    path.write_text("# Results\n\nIntroduction.\n\n## One\n\nfirst\n\n## Two\n\nsecond\n")
    return path


def kept(page: Path) -> bool:
    text = page.read_text()
    return "Introduction." in text and "## One\n\nfirst\n" in text and "## Two\n\nsecond\n" in text


def test_shared_memory_is_compared_with_targets_and_with_the_limit(
    page: Path, tmp_path: Path
) -> None:
    picture = tmp_path / "shm.svg"
    text = run("shm.py", "--quick", "--markdown", str(page), "--plot", str(picture))
    begins = ("all_reduce", "all_gather", "send_recv")
    rows = [line for line in text.splitlines() if line.startswith(begins)]
    assert len(rows) == 6
    assert all(re.search(r"pycoll: [\d.]+ / [\d.]+", row) for row in rows)
    assert all("best MPI / pycoll: " in row and "Gloo / pycoll: " in row for row in rows)
    assert all(re.search(r"pycoll, torch: [\d.]+ / [\d.]+", row) for row in rows)
    assert re.search(r"# .* on 4 ranks takes processor time, us of all ranks: pycoll [\d.]+", text)
    bare = r"[\d.]+ " if platform.machine() == "x86_64" else "- "
    (long,) = [row for row in rows if "bytes: 1048576" in row]
    times = r": [\d.]+ / [\d.]+ .*"
    assert re.search(rf"pycoll, shared arrays{times}bare exchange: {bare}", long)
    assert re.search(r"# .*shared arrays: \d+% of 2np/B, target 70%", text)
    assert re.search(r"# .*(ordinary arrays|torch tensors): \d+% of 2np/B, target 65%", text)
    section = page.read_text().partition("## Shared memory")[2]
    assert section.count("\n| all_") == 5
    assert section.count("\n| send_recv ") == 1
    assert "shm.svg" in section
    assert "bus bandwidth" in picture.read_text()
    assert kept(page)


def test_predictions_are_compared_in_both_memories(page: Path) -> None:
    text = run("predictions.py", "--quick", "--ranks", "2", "--markdown", str(page))
    rows = re.findall(r"^(all_reduce|broadcast)  (ordinary|shared)  .*  [\d.]+$", text, re.M)
    assert rows.count(("all_reduce", "shared")) == rows.count(("broadcast", "ordinary")) == 2
    for memory in ("ordinary", "shared"):
        assert re.search(rf"# {memory} memory: \d of 4 predictions \(\d+%\) are within 30%", text)
    assert page.read_text().count("\n| all_reduce | ") == 4
    assert kept(page)


def test_algorithms_are_compared_on_simulated_hosts(page: Path) -> None:
    text = run("domains.py", "--quick", "--markdown", str(page))
    assert re.search(r"# 4 caches of 4 cores: .* within 10% of the quickest in \d+ of 13", text)
    assert page.read_text().count("\n| all_reduce | ") == 3
    assert kept(page)


def test_a_section_is_replaced_where_it_stands(page: Path) -> None:
    arguments = ("--dtype", "float32", "--op", "sum", "--rounds", "3", "--markdown", str(page))
    for _ in range(2):
        text = run("kernels.py", *arguments)
    for isa in _core.isas():
        assert re.search(rf"dtype .*\b{isa}\b", text)
    assert re.search(r"float32 +sum( +[\d.]+){2,}", text)
    whole = page.read_text()
    assert whole.count("## Reduction kernels") == 1
    assert whole.count("| float32 | sum |") == 1
    assert kept(page)


def test_codecs_are_compared_with_a_copy(page: Path) -> None:
    text = run("codecs.py", "--bytes", "65536", "--long", "0", "--rounds", "3",
               "--markdown", str(page))  # fmt: skip
    for codec in ("bf16", "int8", "int4", "fp8", "sign", "top-k 1 %"):
        assert re.search(rf"{codec} +portable +65536( +[\d.]+){{4}}", text), text
    section = page.read_text().partition("## Codecs")[2]
    assert "| int8 | portable | 65536 |" in section
    assert kept(page)


def test_accuracy_is_compared_with_float32(page: Path) -> None:
    pytest.importorskip("torch", reason="no torch: pip install -r tests/requirements.txt")
    pytest.importorskip("sklearn", reason="no scikit-learn: pip install -r tests/requirements.txt")
    text = run("accuracy.py", "--quick", "--markdown", str(page))
    for method in ("float32", "int8", "top-k 1 %", "top-k 1 %, no feedback", "DiLoCo"):
        assert re.search(rf"\| {re.escape(method)} \| [\d.]+ \|", text), text
    assert re.search(r"\| int8 \|.* -0.5, (reached|missed) \|", text)
    section = page.read_text().partition("## Accuracy by codec")[2]
    assert "### Digits, 1 seeds" in section
    assert kept(page)


def test_a_missed_bound_of_accuracy_is_the_status(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    import accuracy

    found = {"digits": {name: [(0.96, 0.1), (0.98, 0.1)] for name in ("float32", *accuracy.BOUNDS)}}
    found["digits"][accuracy.WITHOUT] = [(0.9, 0.3), (0.98, 0.1)]
    monkeypatch.setattr(accuracy, "measured", lambda *given: found)
    monkeypatch.setattr(sys, "argv", ["accuracy.py"])
    accuracy.main()
    found["digits"]["int8"] = [(0.96, 0.1), (0.968, 0.1)]
    found["digits"]["int4"] = [(0.96, 0.1), (0.962, 0.1)]
    found["digits"][accuracy.WITHOUT] = found["digits"]["float32"]
    with pytest.raises(SystemExit) as ended:
        accuracy.main()
    lines = str(ended.value).splitlines()
    assert len(lines) == 2
    assert lines[0] == ("digits, int8: -0.60 percentage points to float32, bound -0.5, missed")
    assert lines[1].endswith("must be worse, is not: the test shows nothing")
    monkeypatch.setattr(sys, "argv", ["accuracy.py", "--quick"])
    accuracy.main()


def test_element_types_are_compared_with_float32(page: Path) -> None:
    words = ("--bytes", "65536", "--rounds", "3", "--budget-s", "1", "--markdown", str(page))
    text = run("dtypes.py", *words)
    for dtype, most in (("float16", "1.3"), ("bfloat16", "1.3"), ("float8_e4m3", "2")):
        assert re.search(rf"{dtype} / float32: [\d.]+ of {most}, (reached|missed)", text), dtype
    section = page.read_text().partition("## Element types")[2]
    assert section.count("\n| 65536 | ") == 1
    assert kept(page)


def test_costs_of_calls_and_communicators_are_told(page: Path) -> None:
    text = run("overhead.py", "--rounds", "2", "--markdown", str(page))
    for what in ("all_reduce(x, out=x), NumPy", "64 blocking", "64 async", "a group of 64"):
        assert re.search(rf"{re.escape(what)} +[\d.]+ us(, [\d.]+ of np\.add)?\n", text), what
    staging = re.search(r"staging mapped per peer +([\d.]+) MiB", text)
    assert staging is not None
    assert float(staging[1]) > 0
    assert re.search(r"8 ranks: ready, after the last one's init\(\) +[\d.]+ ms", text)
    assert "## Costs of calls" in page.read_text()
    assert kept(page)


def test_training_is_compared_by_all_policies(page: Path, tmp_path: Path) -> None:
    picture = tmp_path / "training.svg"
    words = ("--quick", "--scene", "0", "--model", "small transformer", "--rounds", "3")
    text = run(
        "training.py", *words, "--without-calls", "--markdown", str(page), "--plot", str(picture)
    )
    for way in (*POLICIES, "auto", "hvd", "ddp alone", "ddp", "Gloo DDP"):
        row = rf"\n{way} +step, ms: [\d.]+  not hidden, ms: [\d.]+  hidden: \d+%  .*: [\d.]+\n"
        assert re.search(row, text), way
    assert re.search(r"\nalone +step, ms: [\d.]+ ", text)
    assert "# auto takes " in text
    section = page.read_text().partition("## Training")[2]
    assert "### small transformer, 0 MB; 2 ranks on one host" in section
    measured = section.count("\n| Horovod |")
    assert measured == (ROOT / ".peers/horovod/bin/horovodrun").exists()
    assert measured == section.count("Horovod's time not hidden / that of tensor by tensor ")
    assert section.count("\n| ") == len(POLICIES) + 8 + measured
    assert "training.svg" in section and "not hidden" in picture.read_text()
    assert kept(page)


def test_calls_of_training_are_held_against_what_was_to_be_reached(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    import training_calls as calls

    many = {calls.WHOLE: 1e-3, calls.LIST: 1.2e-3, calls.GROUP: 2e-3, calls.SINGLY: 9e-3}
    times = {calls.WHOLE: 0.01, calls.LIST: 0.011, calls.ASYNC: 0.02, calls.SCHEDULER: 0.0125}
    times[calls.PASS] = 0.008
    name = calls.SETS[0]
    negotiation = {calls.BARRIER: 5e-5, calls.OTHERS: 0.0}
    found = calls.Found(many, {name: times}, {name: 102_000_000}, negotiation)
    assert calls.judged(found) == [
        "Gloo, one by one / list 7.50 of 10, missed",
        "1.5 of one all_reduce / list 1.25 of 1, reached",
        "1.5 of one all_reduce / group 0.75 of 1, missed",
        f"{name}: allreduce_async_ / Horovod 5.54 of 10, missed",
        f"{name}: a pass over the memory / Horovod 13.86, which nothing in place exceeds",
        f"{name}: scheduler's rate / one all_reduce's 0.80 of 0.9, missed",
    ]
    with_horovod = found._replace(horovod={name: 0.204})
    assert f"{name}: allreduce_async_ / Horovod 10.20 of 10, reached" in calls.judged(with_horovod)
    assert [f"{name}: Horovod, tensor by tensor", "0.50 GB/s", ""] in calls.rows(with_horovod)
    lines = calls.rows(found)
    assert lines[0] == ["one all_reduce of 4 MiB", "1 ms", ""]
    assert [f"{name}: scheduler", "8.16 GB/s", "0.80 of one all_reduce's rate"] in lines
    assert lines[-1][1] == "0 exchanges"


def test_consistencies_are_compared_by_their_curves(page: Path, tmp_path: Path) -> None:
    picture = tmp_path / "curves.svg"
    words = ("--quick", "--markdown", str(page), "--plot", str(picture))
    text = run("ps_curves.py", *words)
    rows = [line for line in text.splitlines() if line.startswith("| one slow worker |")]
    assert [row.split(" | ")[1] for row in rows] == ["bsp", "SSP(3)", "asp", "Backup(0.75)"]
    assert "![loss against time by consistency](curves.svg)" in page.read_text() and kept(page)
    assert "time" in picture.read_text()


def test_kernels_of_every_instruction_set_can_be_run_by_hand() -> None:
    sources = [np.arange(100, dtype=np.int32) + k for k in range(3)]
    for isa in _core.isas():
        target = np.zeros(100, np.int32)
        _core.combine(_core.view(target), [_core.view(s) for s in sources], OPS["sum"], isa)
        assert (target == sum(sources)).all(), isa
        again = [_core.view(target), _core.view(sources[0])]
        _core.combine(_core.view(target), again, OPS["sum"], isa, times=2)
        assert (target == sum(sources) + 2 * sources[0]).all(), isa


def test_kernels_refuse_what_they_cannot_combine() -> None:
    x, y, z = np.zeros(8, np.float32), np.zeros(8, np.float32), np.zeros(9, np.float32)
    view = _core.view
    both = [view(x), view(y)]
    for target, sources, op, isa, text in (
        (x, [view(x)], "sum", "reference", "sources are 1, expected 2 to 4"),
        (x, [view(x), view(z)], "sum", "reference", "dtype and count, which is 8"),
        (x, both, "bxor", "reference", "no kernel for this dtype"),
        (x, both, "sum", "neon", "isa is 'neon': not available here"),
        (z[1:], [view(z[:8]), view(y)], "sum", "reference", "overlaps the target partly"),
        (z[::2], [view(z[::2]), view(z[::2])], "sum", "reference", "must be contiguous"),
    ):
        with pytest.raises(InvalidArgumentError, match=re.escape(text)):
            _core.combine(view(target), sources, OPS[op], isa)


def test_joining_is_timed_here_and_at_a_store(page: Path) -> None:
    words = ("--rounds", "1", "--ranks", "2", "--meeting", "8", "--parts", "one-host", "meeting")
    text = run("join.py", *words, "--markdown", str(page))
    assert re.search(r"\| 2 ranks on one host \| [\d.]+ s \|", text)
    assert re.search(r"8 members, threads of 8 processes, meet at a store in [\d.]+ s", text)
    assert kept(page)
    assert "## A large meeting" in page.read_text()
