"""Methods compared by the model: the formulas of servers, the table, and wrong requests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from pycoll.compress import BF16, Block, Codec, PowerSGD, RandomK, TopK
from pycoll.cost.codec_rates import CodecRate
from pycoll.cost.served_work import served_work
from pycoll.errors import InvalidArgumentError
from pycoll.gradients.coded_rates import coded_rate
from pycoll.gradients.communication_plan import Gradient, Rate
from pycoll.gradients.compare import Comparison, Network, compare, rates_of, read_gradients
from pycoll.gradients.methods import METHODS
from pycoll.gradients.policies import Policy, comm_plan_of
from pycoll.gradients.simulate import simulate
from pycoll.tools.cli import main

CABLE = Network(alpha_s=50e-6, bandwidth=1e9, local_alpha_s=1e-6, local_bandwidth=8e9)
LAYERS = [Gradient(4 << 20, 0.002 * n) for n in range(1, 20)]


def test_rates_are_those_of_the_formulas() -> None:
    """4 hosts: a ring takes 1.5 D/B, 4 servers D/B, and servers on the workers as much as a ring.

    Fewer servers share the sums with the workers: 24 / (16 + 2 S) D/B.
    """
    served = {count: rates_of(CABLE, 4, 1, count) for count in (0, 1, 2, 4, 8)}
    shares = {0: 1.5, 1: 24 / 18, 2: 1.2, 4: 1.0, 8: 1.0}
    assert rates_of(CABLE, 4, 1).all_reduce == pytest.approx((4 * 50e-6, 1.5e-9))
    for count, rates in served.items():
        assert rates.busy("ps").beta == pytest.approx(shares[count] * 1e-9)
        alone_s = rates.alone_s("ps", 1 << 20)
        assert alone_s == pytest.approx(100e-6 + shares[count] * 1e-9 * (1 << 20)), count
        begins = rates.alone_s("ps", 0)
        assert begins == pytest.approx(100e-6 + CABLE.serving.alpha), "two hops and a server"
    inside = rates_of(CABLE, 1, 4)
    assert inside.all_reduce == pytest.approx((6e-6, 1.5 / 8e9))
    both = rates_of(CABLE._replace(agree_s=1e-3), 4, 4, 4)
    assert both.all_reduce.alpha == pytest.approx(1e-3 + 6e-6 + 200e-6)
    assert both.alone_s("ps", 0) == pytest.approx(1e-3 + 6e-6 + 100e-6)


def test_a_slow_core_of_a_server_is_the_limit() -> None:
    slow = CABLE._replace(serving=Rate(2e-3, 1e-6))
    legs = rates_of(slow, 8, 1, 8).push_pull
    assert [stage.resources for stage in legs] == [("out",), ("server",), ("in",)]
    assert legs[1].rate == pytest.approx((2e-3, 1e-6)) and legs[1].behind_s == 50e-6
    combined = served_work(8, 2).combined
    assert rates_of(slow, 8, 1, 2).push_pull[1].rate.beta == pytest.approx(combined * 1e-6)
    assert 1 < combined < 4, "the workers combine a share, which 2 servers alone would not leave"
    messages = [Gradient(64, 0.0)] * 10
    plan = comm_plan_of(Policy("wfbp"), messages, rates := rates_of(slow, 8, 1, 8), "ps")
    expected_s = 10 * (2e-3 + 64e-6) + 100e-6
    assert simulate(plan, messages, rates).exposed_s == pytest.approx(expected_s, rel=1e-3)


def test_servers_win_where_the_link_is_the_limit() -> None:
    found = compare(LAYERS, CABLE, hosts=4, servers=[0, 4])
    assert (found.winner.architecture, found.winner.servers) == ("ps", 4)
    assert (found.runner_up.architecture, found.runner_up.servers) != ("ps", 4)
    assert found.winner.step_s < found.runner_up.step_s
    assert {row.method for row in found.rows} == set(METHODS)
    named = [row for row in found.rows if row.method != "auto"]
    for key in {(row.architecture, row.servers) for row in found.rows}:
        rows = [row for row in found.rows if (row.architecture, row.servers) == key]
        best = min(rows, key=lambda row: row.step_s)
        assert best.step_s == min(row.step_s for row in rows if row.method == "auto")
    assert all(0 <= row.hidden <= 1 for row in named)
    text = found.explain()
    assert "winner: " in text and "takes" in text and text.count("\n") == len(found.rows) + 2


def test_the_optimizer_and_the_forward_pass_count() -> None:
    plain = compare(LAYERS, CABLE, hosts=4)
    slow = compare(LAYERS, CABLE._replace(optimizer=Rate(0.1, 0.0)), hosts=4)
    assert slow.computing_s == pytest.approx(plain.computing_s + 0.1)
    assert slow.winner.step_s == pytest.approx(plain.winner.step_s + 0.1)
    overlapped = compare(LAYERS, CABLE, hosts=4, overlaps=True)
    assert overlapped.winner.step_s <= plain.winner.step_s


def test_equal_architectures_are_called_so() -> None:
    found = compare(LAYERS, CABLE._replace(bandwidth=1e15, alpha_s=0.0), hosts=2)
    assert isinstance(found, Comparison) and "is as good" in found.explain()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"gradients": []}, "gradients is empty"),
        ({"hosts": 0}, "hosts is 0"),
        ({"hosts": 1}, "at least two ranks"),
        ({"per_host": True}, "per_host is True"),
        ({"servers": []}, "servers is empty"),
        ({"servers": [0, -1]}, "servers has -1"),
        ({"network": CABLE._replace(bandwidth=0.0)}, "bandwidth is 0.0: expected bytes per second"),
        ({"network": CABLE._replace(alpha_s=-1.0)}, "alpha_s is -1.0: expected seconds"),
        ({"codecs": ["int8"]}, r"codecs\[0\] is 'int8': expected a codec"),
        ({"codecs": [BF16(), BF16()]}, r"codecs has BF16\(\) twice"),
        ({"codecs": [PowerSGD(1)]}, "codecs has PowerSGD.*whose bytes follow from values"),
        (
            {"codecs": [BF16()], "gradients": [Gradient(8, 1.0, "float64")]},
            r"codecs is \[BF16\(\)\] and gradients are float64",
        ),
    ],
)
def test_wrong_clusters_are_refused(change: dict[str, Any], text: str) -> None:
    words: dict[str, Any] = {"gradients": LAYERS, "network": CABLE, "hosts": 4}
    with pytest.raises(InvalidArgumentError, match=text):
        compare(**{**words, **change})


def test_codecs_are_further_methods() -> None:
    """Every all-reduce method with each codec, and auto with a choice for each message."""
    codecs: list[Codec] = [BF16(), Block("int8"), TopK(0.001), RandomK(0.01, 1)]
    slow = CABLE._replace(bandwidth=125e6)
    found = compare(LAYERS, slow, hosts=4, codecs=codecs)
    able = [name for name, one in METHODS.items() if one.architecture != "ps" and name != "dear"]
    labels = [one.label for one in codecs]
    assert labels == ["bf16", "int8", "topk(0.001)", "randomk(0.01)"]
    for label in labels:
        assert sorted(row.method for row in found.rows if row.codec == label) == sorted(able)
    (choice,) = (row for row in found.rows if row.codec == "any")
    assert choice.method == "auto"
    assert choice.step_s <= min(row.step_s for row in found.rows if row.architecture == "a2a")
    plain = compare(LAYERS, slow, hosts=4)
    assert set(plain.rows) <= set(found.rows) and len(found.rows) == len(plain.rows) + 4 * 6 + 1
    assert "a2a+topk(0.001)" in found.explain() and found.winner.codec
    fast = compare(LAYERS, CABLE._replace(bandwidth=1e11), hosts=4, codecs=[TopK(0.5)])
    assert not fast.winner.codec or fast.winner.codec == "any"


def test_rates_of_codecs_are_those_of_the_formulas() -> None:
    """4 hosts at 1 GB/s: int8 sends 65/256 of 1.5 D. A slow core counts, for a rank's share."""

    def beta(codec: Codec, hosts: int, per_host: int, **change: Any) -> float:
        rate = coded_rate(codec, CABLE._replace(**change), hosts, per_host)
        assert rate is not None
        return rate.beta

    fast = (CodecRate("int8", 1e15, 1e15), CodecRate("topk", 1e15, 1e15))
    slow = (CodecRate("int8", 1e9, 2e9), CodecRate("topk", 1e9, 2e9))
    int8 = Block("int8")
    assert beta(int8, 4, 1, codecs=fast) == pytest.approx(1.5 * 65 / 256 / 1e9)
    assert beta(int8, 4, 4, codecs=fast) == pytest.approx(1.5 * 65 / 256 / 1e9)
    assert beta(int8, 1, 4, codecs=fast) == pytest.approx(1.5 * 65 / 256 / 8e9)
    assert beta(int8, 4, 1, codecs=slow) == pytest.approx(1 / 1e9 + 1.75 / 2e9)
    assert beta(int8, 4, 4, codecs=slow) == pytest.approx((1 / 1e9 + 1.75 / 2e9) / 4)
    sparse = beta(TopK(0.01), 4, 1, codecs=fast)
    assert sparse == pytest.approx(0.75 * (0.02 + 0.08) / 1e9, rel=1e-3)
    late = beta(TopK(0.01), 4, 1, codecs=slow) - sparse
    assert late == pytest.approx(1 / 1e9 + 2 / 2e9, rel=1e-3)
    assert coded_rate(PowerSGD(1), CABLE, 4, 1) is None


def test_files_of_gradients(tmp_path: Path) -> None:
    path = tmp_path / "layers.csv"
    head = "tensor,elements,microseconds_after_previous,dtype\n"
    path.write_text(f"{head}a,10,5,float16\nb,3,1.5,\n")
    one, two = read_gradients(path)
    assert one == Gradient(20, pytest.approx(5e-6), "float16")
    assert two == Gradient(12, pytest.approx(6.5e-6))
    for text, told in {
        head: "has no gradients",
        f"{head}a,10,-5,\n": "line 2: expected the columns tensor",
        f"{head}a,1,5,\na,x,5,\n": "line 3: expected the columns tensor",
        f"{head}a,1,5,int7\n": "line 2: .*int7",
        "size\n3\n": "microseconds_after_previous",
    }.items():
        path.write_text(text)
        with pytest.raises(InvalidArgumentError, match=told):
            read_gradients(path)
    with pytest.raises(InvalidArgumentError, match="cannot be read: No such file"):
        read_gradients(tmp_path / "none.csv")


def test_the_command_compares_a_file(tmp_path: Path) -> None:
    path = tmp_path / "layers.csv"
    path.write_text(
        "tensor,elements,microseconds_after_previous\n"
        + "".join(f"layer.{n},1000000,2000\n" for n in range(20))
    )

    def said(*words: str) -> str:
        result = CliRunner().invoke(main, ["explain", *words])
        return result.output if result.exit_code == 0 else f"{result.exit_code}: {result.output}"

    links = ("--hosts", "4", "--local-size", "2", "--alpha", "50us", "--beta", "1GB/s")
    text = said("--gradients", str(path), *links)
    assert (
        text.startswith("4 hosts of 2 ranks; values: ") and "winner: auto by ps, 4 servers" in text
    )
    one = said("--gradients", str(path), *links, "--servers", "1")
    assert "winner: auto by ps, 1 servers and the workers;" in one and "ps    1 mixed " in one
    for words, told in {
        ("--gradients", str(path), "--servers", "two"): "'two' is not a valid integer",
        ("--gradients", str(path), "--rank", "0"): "--gradients excludes --rank",
        ("--gradients", str(tmp_path / "none"), *links): "cannot be read",
        ("--gradients", str(path)): "expected at least two ranks",
    }.items():
        assert told in said(*words), words
