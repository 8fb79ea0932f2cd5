"""Compare all methods for a cluster by the model, without any rank.

``rates_of`` turns links into the rates of messages. N ranks are H hosts with G ranks each, and the
link of a host carries B bytes/s each way. A message of n bytes takes:

    inside a host      2 (G-1)/G n at the rate of a rank, while the rest is between hosts
    a2a                2 (H-1)/H n/B, and 2 log2(H) latencies
    ps, S >= H         n/B: servers own the sums
    ps, mixed, S < H   2H (H-1) / (H^2 + SH - 2S) n/B: the workers own a part of the sums as well
    ps, no servers     2 (H-1)/H n/B: every host is the server of a share

A message by ps has three stages: the links to the servers, the servers' cores, and the links back.
Each link carries the n/B above. A core takes a constant for each message, and a time for each byte
that it combines. Segments pass on as they come, a latency later. So a message alone takes n/B and 2
latencies, and messages that follow each other take n/B each.

Every message also takes what the ranks need to agree on it, where a system negotiates each message.
``coded_rates`` has the formulas of messages that travel as codes.
"""

from __future__ import annotations

import csv
import itertools
from collections.abc import Sequence
from math import ceil, log2
from pathlib import Path
from typing import NamedTuple

from pycoll.compress import Codec
from pycoll.cost import codec_rates as core_rates
from pycoll.cost.codec_rates import CodecRate
from pycoll.cost.model import LINKS
from pycoll.cost.selection import bytes_text, seconds_text
from pycoll.cost.served_work import served_work
from pycoll.errors import InvalidArgumentError
from pycoll.gradients.chooser import decide
from pycoll.gradients.codec_choice import by_label
from pycoll.gradients.coded_rates import coded_rate
from pycoll.gradients.communication_plan import (
    A2A,
    ARCHITECTURES,
    CODED_KIND,
    IN,
    OUT,
    PLUS,
    PS,
    SERVER,
    Gradient,
    Rate,
    Rates,
    Stage,
    coded_way,
    label_of,
)
from pycoll.gradients.measure import held_up
from pycoll.gradients.methods import METHODS
from pycoll.gradients.policies import Policy

#: Methods that differ by less than this share of the step count as equal in the text.
EQUAL = 0.005


#: The time of a core of pycoll's servers: seconds to begin an operation, and s/byte to combine.
SERVING = Rate(50e-6, LINKS["tcp"].gamma)


class Network(NamedTuple):
    """The links of a cluster, and what a step takes apart from its passes.

    Arguments:
        ``alpha_s``: seconds until a message has arrived at another host.
        ``bandwidth``: bytes/s of the link of a host, each way.
        ``local_alpha_s``, ``local_bandwidth``: the same for a rank inside its host.
        ``agree_s``: seconds in which ranks agree on one message; 0 for pycoll, whose ranks have
            agreed before.
        ``optimizer``: the time of the optimizer's step by bytes of gradients.
        ``codecs``: the rates of codecs on a core.
        ``serving``: the time of a server's core for a message, by the bytes that it combines; the
            constant is what a server needs to begin an operation.

    Errors: none here; ``compare`` checks the numbers. Cost: none.

    >>> pycoll.optim.Network(alpha_s=20e-6, bandwidth=1.1e9).local_bandwidth
    10000000000.0
    """

    alpha_s: float
    bandwidth: float
    local_alpha_s: float = 1e-6
    local_bandwidth: float = 10e9
    agree_s: float = 0.0
    optimizer: Rate = Rate(0.0, 0.0)
    codecs: tuple[CodecRate, ...] = core_rates.BUILT_IN
    serving: Rate = SERVING


#: The codec of a row whose messages each choose one, or none.
ANY = "any"


class Row(NamedTuple):
    """The prediction for one method; ``servers``: hosts of servers, 0 for none apart.

    ``is_mixed``: whether workers own a part of the sums next to the servers. ``codec``: the label
    of the codec of all messages; "any" where each message chooses one or none; "" without.
    """

    method: str
    architecture: str
    servers: int
    step_s: float
    hidden: float
    messages: int
    is_mixed: bool = False
    codec: str = ""

    @property
    def by(self) -> str:
        """The architecture and the codec as one word."""
        return f"{self.architecture}{PLUS}{self.codec}" if self.codec else self.architecture


class Comparison(NamedTuple):
    """All rows of ``compare``, the shortest step first.

    Arguments: ``rows``, one for each method that was tried; ``computing_s``, the seconds of the
    passes alone; ``nbytes``, the bytes of all gradients.

    Errors and cost: none.

    >>> cable = pycoll.optim.Network(alpha_s=50e-6, bandwidth=1.1e9)
    >>> found = pycoll.optim.compare([pycoll.optim.Gradient(4 << 20, 0.01)], cable, hosts=4)
    >>> found.winner is found.rows[0]
    True
    """

    rows: tuple[Row, ...]
    computing_s: float
    nbytes: int

    @property
    def winner(self) -> Row:
        """The row with the shortest step."""
        return self.rows[0]

    @property
    def runner_up(self) -> Row:
        """The best row of another architecture, servers or codec, else the next row."""
        best = self.rows[0]
        others = (row for row in self.rows if (row.by, row.servers) != (best.by, best.servers))
        return next(others, self.rows[min(1, len(self.rows) - 1)])

    def explain(self) -> str:
        """The table, the winner, and the price of the best other architecture."""
        head = (
            f"{bytes_text(self.nbytes)} of gradients; computing takes "
            f"{seconds_text(self.computing_s)}"
        )
        wide = max(4, *(len(row.by) for row in self.rows))
        words = f"{'servers':>8} {'step':>9} {'hidden':>7} {'messages':>9}"
        lines = [head, f"  {'method':<18} {'by':<{wide}} {words}"]
        for row in self.rows:
            servers = str(row.servers) if row.servers else "-"
            if row.is_mixed:
                servers += " mixed"
            figures = f"{seconds_text(row.step_s):>9} {row.hidden:>7.0%} {row.messages:>9}"
            lines.append(f"  {row.method:<18} {row.by:<{wide}} {servers:>8} {figures}")
        best, other = self.winner, self.runner_up
        price = other.step_s / best.step_s - 1
        words = f"the best other choice, {_name(other)}, takes {price:.1%} longer"
        if price < EQUAL:
            words = f"{_name(other)} is as good"
        return "\n".join([*lines, f"winner: {_name(best)}; {words}"])


def _name(row: Row) -> str:
    if row.architecture == A2A:
        return f"{row.method} by {row.by}"
    apart = f"{row.servers} servers{' and the workers' if row.is_mixed else ''}"
    return f"{row.method} by ps, {apart if row.servers else 'on the workers'}"


def rates_of(network: Network, hosts: int, per_host: int, servers: int = 0) -> Rates:
    """The rates of messages; ``servers``: the number of hosts that only serve, 0 for none."""
    inside = 2 * (per_host - 1) / per_host / network.local_bandwidth
    inside_s = 2 * (per_host - 1) * network.local_alpha_s
    shared = 2 * (hosts - 1) / hosts / network.bandwidth
    rounds = 2 * ceil(log2(hosts)) if hosts > 1 else 0
    start_s = network.agree_s + inside_s
    ring = Rate(start_s + rounds * network.alpha_s, max(inside, shared))
    half = Rate(network.agree_s + (ring.alpha - network.agree_s) / 2, ring.beta / 2)
    work = served_work(hosts, servers)
    leg = max(inside, work.carried / network.bandwidth)
    hop_s = network.alpha_s if hosts > 1 or servers else 0.0
    served = (
        Stage(Rate(start_s, leg), (OUT,)),
        Stage(Rate(network.serving.alpha, network.serving.beta * work.combined), (SERVER,), hop_s),
        Stage(Rate(0.0, leg), (IN,), hop_s),
    )
    return Rates(ring, half, half, push_pull=served, optimizer=network.optimizer)


def compare(
    gradients: Sequence[Gradient],
    network: Network,
    *,
    hosts: int,
    per_host: int = 1,
    servers: Sequence[int] = (0,),
    overlaps: bool = False,
    codecs: Sequence[Codec] = (),
) -> Comparison:
    """Predict the step of every method on a cluster, without any rank.

    Arguments:
        ``gradients``: in the order of the backward pass; times in seconds from its start.
        ``network``: the links of the cluster.
        ``hosts``: the number of worker hosts.
        ``per_host``: the number of ranks on each.
        ``servers``: numbers of hosts that only serve, each of which is tried; 0: every worker is
            the server of a share.
        ``overlaps``: whether the next forward pass waits for gradients one by one (``model=`` of
            DistributedOptimizer). The forward pass takes half as long as the backward pass.
        ``codecs``: codecs of ``pycoll.compress`` with each of which every method whose messages are
            all_reduces is tried as well; where there are some, also auto with a choice for each
            message. They apply to float32.

    Result: a ``Comparison``; ``explain()`` is its table.

    Errors: InvalidArgumentError for no gradients, for numbers out of bounds and for a value that is
    no codec. Also for codecs whose bytes depend on values or shapes.

    Cost: milliseconds per method.

    Source: the methods of Shi et al., arXiv 2005.13247; see docs/scheduling.md.

    >>> steps = [pycoll.optim.Gradient(4 << 20, 0.01 * n) for n in range(1, 9)]
    >>> cable = pycoll.optim.Network(alpha_s=50e-6, bandwidth=1.1e9)
    >>> pycoll.optim.compare(steps, cable, hosts=4, servers=[0, 4]).winner.architecture
    'ps'
    """
    _check(gradients, network, hosts, per_host, servers)
    coded = _rates_with_codecs(gradients, network, hosts, per_host, codecs)
    ready = [0.0, *(one.ready_s for one in gradients)]
    passes_s = [(now - before) / 2 for before, now in itertools.pairwise(ready)]
    nbytes = sum(one.nbytes for one in gradients)
    computing_s = 1.5 * ready[-1] + network.optimizer.seconds(nbytes)
    forward_s = passes_s if overlaps else None
    rows = []

    def add(name: str, rates: Rates, architecture: str, count: int, codec: str) -> None:
        found = decide(Policy(METHODS[name].policy), gradients, rates, forward_s, architecture)
        messages = found.comm_plan.messages
        took_s = sum(rates.busy(one.architecture).seconds(one.nbytes) for one in messages)
        exposed_s = max(0.0, found.exposed_s)
        hidden = 1 - min(1.0, exposed_s / took_s) if took_s > 0 else 1.0
        step_s = computing_s + found.exposed_s
        plain = architecture.partition(PLUS)[0]
        mixed = plain == PS and 0 < count < hosts
        rows.append(Row(name, plain, count, step_s, hidden, len(messages), mixed, codec))

    for name, method in METHODS.items():
        every = ARCHITECTURES if method.architecture == "auto" else (method.architecture,)
        for architecture in every:
            for count in servers if architecture == PS else (0,):
                add(name, rates_of(network, hosts, per_host, count), architecture, count, "")
        if A2A in every and method.policy != "dear":
            for way, _ in coded.coded:
                add(name, coded, way, 0, label_of(way))
            if coded.coded and name == "auto":
                add(name, coded, A2A, 0, ANY)
    rows.sort(key=lambda row: (row.step_s, row.servers, row.architecture != A2A, row.codec))
    return Comparison(tuple(rows), computing_s, nbytes)


def _rates_with_codecs(
    gradients: Sequence[Gradient],
    network: Network,
    hosts: int,
    per_host: int,
    codecs: Sequence[Codec],
) -> Rates:
    """The rates of all_reduces, with those of each codec."""
    rates = rates_of(network, hosts, per_host)
    if not codecs:
        return rates
    ways = {coded_way(label): codec for label, codec in by_label(codecs).items()}
    found = []
    for way, codec in ways.items():
        rate = coded_rate(codec, network, hosts, per_host)
        if rate is None:
            raise InvalidArgumentError(
                f"codecs has {codec!r}, whose bytes follow from values or shapes: the model "
                "predicts BF16, FP8, Block, Sign, TopK and RandomK"
            )
        found.append((way, rate))
    if all(one.kind != CODED_KIND for one in gradients):
        raise InvalidArgumentError(
            f"codecs is {list(codecs)!r} and gradients are {gradients[0].kind}: codecs take "
            f"{CODED_KIND}"
        )
    return rates._replace(coded=tuple(found), holding=held_up(ways.items()))


def _check(
    gradients: Sequence[Gradient],
    network: Network,
    hosts: int,
    per_host: int,
    servers: Sequence[int],
) -> None:
    if not gradients:
        raise InvalidArgumentError("gradients is empty: expected at least one Gradient")
    for word, number in (("hosts", hosts), ("per_host", per_host)):
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise InvalidArgumentError(f"{word} is {number!r}: expected a number above 0")
    if hosts * per_host < 2:
        raise InvalidArgumentError("hosts and per_host are 1: expected at least two ranks")
    if not servers:
        raise InvalidArgumentError("servers is empty: expected numbers, 0 for none apart")
    for count in servers:
        if isinstance(count, bool) or not isinstance(count, int) or count < 0:
            raise InvalidArgumentError(f"servers has {count!r}: expected numbers from 0 on")
    for word in ("bandwidth", "local_bandwidth"):
        if not getattr(network, word) > 0:
            value = getattr(network, word)
            raise InvalidArgumentError(f"{word} is {value!r}: expected bytes per second above 0")
    for word in ("alpha_s", "local_alpha_s", "agree_s"):
        if not getattr(network, word) >= 0:
            value = getattr(network, word)
            raise InvalidArgumentError(f"{word} is {value!r}: expected seconds from 0 on")


def read_gradients(path: Path) -> list[Gradient]:
    """Read a CSV file with the columns tensor, elements, microseconds_after_previous and dtype.

    The rows are in the order of the backward pass; dtype may be missing (float32). Raises
    InvalidArgumentError that names the line.
    """
    widths = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}
    found: list[Gradient] = []
    now_s = 0.0
    try:
        with path.open(newline="") as file:
            for row in csv.DictReader(file):
                after_s = float(row["microseconds_after_previous"]) * 1e-6
                kind = row.get("dtype") or "float32"
                elements = int(row["elements"])
                if after_s < 0 or elements < 0:
                    raise ValueError("negative")
                now_s += after_s
                found.append(Gradient(elements * widths[kind], now_s, kind))
    except OSError as error:
        raise InvalidArgumentError(f"{path} cannot be read: {error.strerror}") from error
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidArgumentError(
            f"{path}, line {len(found) + 2}: expected the columns tensor, elements, "
            f"microseconds_after_previous and perhaps dtype, with numbers from 0 on ({error!r})"
        ) from error
    if not found:
        raise InvalidArgumentError(f"{path} has no gradients")
    return found
