"""What the cost model says about codecs: formulas, verdicts with figures, wrong requests."""

from __future__ import annotations

from typing import Any

import pytest
from click.testing import CliRunner
from harness import world_in_threads

from pycoll.comm.codecs import model_codec
from pycoll.compress import (
    BF16,
    FP8,
    Block,
    Codec,
    Custom,
    PowerSGD,
    RandomK,
    Sign,
    Threshold,
    TopK,
)
from pycoll.cost import codec_rates
from pycoll.cost.codec_costs import Coded, CodedCost, coded_cost, coded_text, rate_of, wire_bytes
from pycoll.cost.codec_rates import CodecRate
from pycoll.cost.model import DEFAULT, LINKS, Parameters
from pycoll.errors import InvalidArgumentError
from pycoll.schedule.collectives import Collective
from pycoll.schedule.topology import Topology, single_host
from pycoll.tools.cli import main
from pycoll.tools.codec_words import codec_of
from pycoll.tools.tune.codec_speed import measured_rates

MIB = 1 << 20
INT8 = Block("int8")
#: Hosts at 1.25 GB/s, and codecs that take a second for each GB.
SLOW = Parameters(
    across=LINKS["tcp"]._replace(beta=1 / 1.25e9),
    codecs=tuple(CodecRate(one.name, 1e9, 2e9) for one in codec_rates.BUILT_IN),
)


def cost(codec: Codec, topology: Topology, nbytes: int, kind: str = "ALL_REDUCE") -> CodedCost:
    collective = Collective[kind]
    return coded_cost(collective, topology, nbytes, model_codec(collective, nbytes, codec), SLOW)


@pytest.mark.parametrize(
    ("kind", "encoded", "decoded"),
    [
        ("ALL_REDUCE", 1, 7 / 4),
        ("REDUCE_SCATTER", 3 / 4, 3 / 4),
        ("ALL_GATHER", 1 / 4, 1),
        ("BROADCAST", 1, 1),
    ],
)
def test_values_are_encoded_and_decoded_as_counted(
    kind: str, encoded: float, decoded: float
) -> None:
    """4 hosts; with 2 ranks each, a rank codes half of the message, and a root all of it."""
    took = cost(INT8, Topology.even(4, 4), 64 * MIB, kind).codec
    assert took == pytest.approx(64 * MIB * (encoded / 1e9 + decoded / 2e9))
    shared = cost(INT8, Topology.even(8, 4), 64 * MIB, kind).codec
    assert shared == pytest.approx(took if kind == "BROADCAST" else took / 2)


def test_links_and_codec_overlap_in_pieces() -> None:
    found = CodedCost("", 3.0, 1.0, 4, 0.0)
    assert found.seconds == 3.25
    assert found._replace(pieces=1).seconds == 4.0
    long = cost(INT8, Topology.even(4, 4), 64 * MIB)
    assert long.pieces > 100
    assert max(long.links, long.codec) < long.seconds < 1.01 * max(long.links, long.codec)
    oversubscribed = coded_cost(
        Collective.ALL_REDUCE,
        Topology.even(4, 4),
        64 * MIB,
        Coded("int8", 0.25),
        SLOW.with_ranks_per_core(2),
    )
    assert oversubscribed.pieces == 1 and oversubscribed.codec == pytest.approx(2 * long.codec)


def test_bytes_on_the_wire_are_those_of_the_formulas() -> None:
    """Two-shot: 2 (p-1)/p of the codes. Top-k: codes to their owners, at worst all places back."""
    n, four = 16 * MIB, Topology.even(4, 4)
    assert wire_bytes(Collective.ALL_REDUCE, "ring", four, n, DEFAULT) == 1.5 * n
    assert wire_bytes(Collective.ALL_REDUCE, "ring", single_host(4), n, DEFAULT) == 1.5 * n
    for codec, ratio in (
        (BF16(), 1 / 2),
        (FP8(128), 33 / 128),
        (INT8, 65 / 256),
        (Block("int4"), 33 / 256),
        (Sign(), 9 / 256),
    ):
        assert cost(codec, four, n).wire == pytest.approx(1.5 * ratio * n)
    # Heads of 6 and of 4 numbers to each of 4 ranks. The codes behind them are no further bytes.
    facts = 0.75 * 4 * 8 * (6 + 4)
    top = cost(TopK(0.01), four, n).wire
    assert top == pytest.approx(0.75 * (0.02 + 4 * 0.02) * n + facts, rel=1e-4)
    assert cost(TopK(0.5), four, n).wire == pytest.approx(0.75 * (1 + 1) * n + facts, rel=1e-4)
    common = cost(RandomK(0.01, 1), four, n).wire
    assert common == pytest.approx(1.5 * 0.01 * n + 0.75 * 4 * (48 + 1024), rel=1e-4)
    # Hosts add up their values, so the links carry what they carry with one rank on each.
    assert cost(TopK(0.01), Topology.even(16, 4), n).wire == pytest.approx(top, rel=0.1)
    # Between 2 hosts of 2 ranks, each host sends 2 (2-1)/2 of the codes.
    assert cost(INT8, Topology.even(4, 2), n).wire == pytest.approx(65 / 256 * n)


def test_it_pays_over_slow_links_and_not_inside_a_host() -> None:
    slow = SLOW._replace(codecs=DEFAULT.codecs, across=LINKS["tcp"]._replace(beta=8e-9))

    def text(codec: Codec, topology: Topology, parameters: Parameters) -> str:
        coded = model_codec(Collective.ALL_REDUCE, 16 * MIB, codec)
        return coded_text(Collective.ALL_REDUCE, topology, 16 * MIB, repr(codec), coded, parameters)

    for codec, times in ((BF16(), "1.9"), (INT8, "3.")):
        found = text(codec, Topology.even(4, 2), slow)
        assert f"verdict    pays: {times}" in found and "codes between hosts" in found
    assert "GB/s (built in)" in found and "bytes      4.06 MiB from each host, 16 MiB" in found
    assert "pays: " in text(TopK(0.001), Topology.even(4, 4), slow)
    inside = text(INT8, single_host(4), slow)
    assert "verdict    does not pay here: " in inside and "codes between all ranks" in inside
    assert "with it, " in inside and "the codec takes " in inside
    assert "the links take no less" in text(TopK(1.0), single_host(4), slow)


def test_communicators_explain_codecs() -> None:
    comm = world_in_threads(2).communicators[0]
    text = comm.explain("all_reduce", 1 << 24, Block("int8", block=64))
    assert "does not pay here" in text and "codes take 0.266 of float32" in text
    assert "an all_to_all of codes" in comm.explain("all_reduce", 1 << 20, TopK(0.5))
    for codec in (Custom(bytes, bytes), PowerSGD(1), Threshold(1.0)):
        with pytest.raises(InvalidArgumentError, match="whose bytes follow from values or shapes"):
            comm.explain("all_reduce", 100, codec)
    with pytest.raises(InvalidArgumentError, match="'gather', which takes no codec; these do: all"):
        comm.explain("gather", 100, INT8)
    with pytest.raises(InvalidArgumentError, match="predicts this codec in all_reduce only"):
        comm.explain("broadcast", 100, TopK(0.5))
    for wrong in ("int8", Block, 8):
        with pytest.raises(InvalidArgumentError, match=r"expected a codec of pycoll\.compress"):
            comm.explain("all_reduce", 100, wrong)


def said(*words: str) -> str:
    result = CliRunner().invoke(main, ["explain", *words])
    return result.output if result.exit_code == 0 else f"{result.exit_code}: {result.output}"


def test_the_command_line_explains_codecs() -> None:
    link = ("--hosts", "4", "--size", "4", "--beta", "1Gb/s", "--bytes", "16M")
    both = said(*link, "--compress", "int8", "--compress", "topk:0.01")
    assert both.count("verdict    pays: ") == 2 and "all_reduce of 16 MiB on" not in both[-400:]
    assert "Block(codes='int8'" in both and "TopK(density=0.01)" in both
    assert "does not pay here" in said("--size", "2", "--compress", "bf16")
    for words, text in {
        ("--compress", "int9"): "--compress is 'int9': expected one of bf16, fp8, int8, int4, sign",
        ("--compress", "topk"): "a share of the values such as topk:0.01, randomk:0.01",
        ("--compress", "topk:2"): "density is 2.0: expected a number above 0 and at most 1",
        ("--compress", "topk:x"): "--compress is 'topk:x': could not convert",
        ("gather", "--compress", "int8"): "collective is 'gather', which takes no codec",
        ("broadcast", "--compress", "topk:0.1"): "predicts this codec in all_reduce only",
        ("--compress", "int8", "--rank", "1"): "--compress excludes --rank",
        ("--compress", "int8", "--servers", "1"): "--compress excludes --servers",
    }.items():
        assert text in " ".join(said(*words).split()), words


def test_every_codec_of_the_model_is_measured_and_has_a_word() -> None:
    rates = {one.name: one for one in measured_rates(quick=True)}
    assert set(rates) == {one.name for one in codec_rates.BUILT_IN}
    assert all(1e3 < value < 1e15 for one in rates.values() for value in one[1:])
    words: Any = {"topk": "topk:0.5", "randomk": "randomk:0.5"}
    for name in rates:
        described = codec_of(words.get(name, name)).modelled(100)
        assert described is not None and rate_of(described.name, DEFAULT).name == name
