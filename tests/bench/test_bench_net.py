"""bench/net.py: runs small on hosts made of namespaces, counts bytes, and leaves nothing behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from harness import ROOT

sys.path.insert(0, str(ROOT / "bench"))
import hosts

SCRIPT = str(ROOT / "bench" / "net.py")


@pytest.fixture(autouse=True, scope="module")
def possible() -> None:
    """Said once, where hosts cannot be made."""
    why = hosts.obstacle()
    if why:
        pytest.skip(f"bench/net.py needs root and network namespaces: {why}")


def left(maker: int) -> list[str]:
    """Namespaces of a process's hosts that are there; other tests make some of their own."""
    shown = subprocess.run(["ip", "netns"], capture_output=True, text=True, check=True).stdout
    return [line for line in shown.splitlines() if line.startswith(f"pycoll-{maker}-")]


def test_hosts_reach_each_other_by_name_and_count_what_they_send() -> None:
    with hosts.Hosts(3, hosts.ONE_GIGABIT) as world:
        assert len(left(os.getpid())) == 4, "three hosts and a switch"
        listen = "import socket; s = socket.create_server(('', 9)); s.accept()[0].recv(1 << 20)"
        server = subprocess.Popen(world.on(2, [sys.executable, "-c", listen]))
        send = (
            "import socket, time\nfor _ in range(100):\n try:\n"
            "  socket.create_connection(('host2', 9)).sendall(bytes(5000)); break\n"
            " except OSError: time.sleep(0.05)"
        )
        sent = world.sent(0)
        subprocess.run(world.on(0, [sys.executable, "-c", send]), check=True)
        server.wait(10)
        # Not all packets are of TCP, and the first ones carry more options.
        assert abs(world.sent(0) - sent - 5000) < 250
        assert world.sent(1) < 500
    assert not left(os.getpid())
    assert not Path("/etc/netns", world.space(0)).exists()


def test_the_whole_table_runs_small(tmp_path: Path) -> None:
    page, picture = tmp_path / "RESULTS.md", tmp_path / "net.svg"
    page.write_text("# Results\n\n## One\n\nfirst\n")
    line = [sys.executable, SCRIPT, "--quick", "--markdown", str(page), "--plot", str(picture)]
    process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    stdout, stderr = process.communicate(timeout=280)
    assert process.returncode == 0, stderr
    rows = [line for line in stdout.splitlines() if line.startswith("bytes: ")]
    assert len(rows) == 6
    assert sum("best MPI / pycoll" in row and "Gloo / pycoll" in row for row in rows) == 2
    assert sum("busbw / iperf3" in row for row in rows) == 1
    assert sum("best / chosen" in row for row in rows) == 2
    assert sum("busbw / line rate" in row for row in rows) == 1
    counted = re.findall(r"(hierarchical|ring) sends (\S+) of (\d+) B, as the formula", rows[-1])
    assert [(name, int(formula)) for name, _, formula in counted] == [
        ("hierarchical", 1 << 20),
        ("ring", 3 << 19),
    ], rows[-1]
    text = page.read_text()
    assert text.startswith("# Results\n\n## One\n\nfirst\n\n## Between hosts")
    assert text.count("### ") == 4
    assert "bus bandwidth" in picture.read_text()
    assert not left(process.pid)


def test_training_runs_over_a_cable_with_a_rate() -> None:
    script = str(ROOT / "bench" / "training.py")
    words = ("--quick", "--scene", "1", "--model", "few gradients", "--library", "gloo")
    done = subprocess.run(
        [sys.executable, script, *words], capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "# few gradients, 1 MB; 2 hosts, cable of 10 Gb/s" in done.stdout
    for told in (
        r"\nGloo DDP +step",
        r"# \w+ / auto [\d.]+ of 0.97",
        r"# wfbp / mg_wfbp [\d.]+ of 1",
    ):
        assert re.search(told, done.stdout), done.stdout


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_however_it_ends(how: signal.Signals) -> None:
    process = subprocess.Popen(
        [sys.executable, SCRIPT, "--scene", "2"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 60
        while len(left(process.pid)) < 5 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert len(left(process.pid)) == 5, "four hosts and a switch"
        time.sleep(1)
        process.send_signal(how)
        process.wait(60)
        while left(process.pid) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not left(process.pid)
    finally:
        process.kill()
        process.wait()


def test_steps_are_replayed_between_hosts(tmp_path: Path) -> None:
    page = tmp_path / "replay.md"
    words = ("--quick", "--workers", "2", "--servers", "1")
    paths = ("--markdown", str(page), "--plot", str(tmp_path))
    script = str(ROOT / "bench" / "replay.py")
    done = subprocess.run(
        [sys.executable, script, *words, *paths],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    text = page.read_text()
    for method in ("BSP-PS", "MG-WFBP", "dear", "auto"):
        row = rf"\| {method} \| [\d.]+ \| [\d.]+ \| [+-][\d.]+% \| \d+% \| \d+% \| \d+ \|"
        assert re.search(row, text), text
    assert "1 MiB: servers apart " in text and "auto takes " in text
    assert (tmp_path / "replay-resnet50.png").read_bytes().startswith(b"\x89PNG")


def test_codecs_are_compared_with_float32_and_with_hooks_over_gloo(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="no torch: pip install -r tests/requirements.txt")
    script, page = str(ROOT / "bench" / "compressed.py"), tmp_path / "page.md"
    done = subprocess.run(
        [
            sys.executable,
            script,
            "--hosts",
            "2",
            "--mib",
            "0.25",
            "--rounds",
            "2",
            "--markdown",
            str(page),
        ],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"# bf16 is [\d.]+ x gloo fp16, target 2\n", done.stdout)
    text = page.read_text()
    assert "## Codecs between 2 hosts, 1 Gb/s, 0.25 MiB of float32\n" in text
    rows = re.findall(
        r"^\| (\S.*?) \| [\d.]+ \| [\d.]+ \| ([\d.]*) (?:\| [\d.]+ ){2}\|$", text, re.M
    )
    assert len(rows) == 10 and rows[0] == ("float32", "") and ("int8", "3") in rows, text


def test_the_time_to_a_loss_is_measured_and_drawn(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="no torch: pip install -r tests/requirements.txt")
    script, page, picture = str(ROOT / "bench" / "time_to_loss.py"), tmp_path / "a.md", "a.svg"
    line = [sys.executable, script, "--quick", "--markdown", str(page)]
    line += ["--plot", str(tmp_path / picture)]
    process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    stdout, stderr = process.communicate(timeout=280)
    assert process.returncode == 0, stderr
    text = page.read_text()
    assert "\n## Time to a loss over slow links, 1 Gb/s\n" in text
    assert f"![accuracy and loss against seconds, by method]({picture})" in text
    assert re.search(r"2 hosts, links of 1 Gb/s, a transformer of [\d.]+ MB of gradients\. ", text)
    rows = re.findall(
        r"^\| (\S.*?) \| [\d.]+ ms \| [\d.]+ \| [\d.]+% \| [\d.]+ s \| ([\d.]+) \|$", stdout, re.M
    )
    assert [name for name, _ in rows] == ["float32", "int8", "top-k 1 %", "DiLoCo"], stdout
    assert rows[0][1] == "1.00", "float32's speed is the measure"
    for told in (
        r"\| a step without communication \| [\d.]+ ms \|",
        r"\| lost of a step, on the average \| [\d.]+% \| 2%, (reached|missed) \|",
        r"\| hidden of the outer step \| -?[\d.]+% \| 90%, (reached|missed) \|",
    ):
        assert re.search(told, stdout), stdout
    assert "seconds of training" in (tmp_path / picture).read_text()
    assert not left(process.pid)
