"""The survey: doctors of several hosts meet, probe each other, and all know the whole result.

A doctor needs one thing to meet the others: a function that gathers bytes. Over ssh the command
that was typed relays them (relay.py), so the survey works also where the hosts do not reach each
other.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace

from pycoll.config import Config
from pycoll.errors import PycollError
from pycoll.tools.doctor.host_facts import HostFacts, collect_facts, decode_facts
from pycoll.tools.doctor.probes import Link, Prober, decode_link
from pycoll.tools.doctor.responder import TOKEN_BYTES, Responder
from pycoll.untrusted import read_json

#: Takes this doctor's bytes and returns those of all doctors, in one order; empty for a doctor
#: that is gone. Raises pycoll's errors.
Gather = Callable[[bytes], Sequence[bytes]]
#: The rate is measured to so many hosts that follow in the order of hosts.
RATES_MAX = 8


@dataclass(frozen=True)
class Survey:
    """``hosts`` took part, with the first doctor of each machine. ``links`` are the ways between
    them.

    ``absent`` has the hosts that did not take part, or not to the end, with the reason.
    ``doubles`` are pairs of different labels that mean one machine. ``listed``: the hosts come from
    a list for ``pycoll run``, which refuses doubles.
    """

    hosts: Sequence[HostFacts]
    links: Sequence[Link] = ()
    absent: dict[str, str] = field(default_factory=dict)
    doubles: Sequence[tuple[str, str]] = ()
    listed: bool = False


def survey_of(
    facts: Sequence[bytes], links: Sequence[bytes] = (), absent: dict[str, str] | None = None
) -> Survey:
    """Return the survey of what all doctors sent in their first and in their last round."""
    hosts: list[HostFacts] = []
    doubles = []
    missing = dict(absent or {})
    for number, blob in enumerate(facts):
        if not blob:
            continue
        try:
            one = decode_facts(blob)
        except (ValueError, TypeError) as error:
            missing[f"host {number}"] = f"its facts are unreadable ({error}): another version?"
            continue
        same = next((at for at, other in enumerate(hosts) if other.machine == one.machine), None)
        if same is None:
            twins = sum(other.label.split(" #")[0] == one.label for other in hosts)
            hosts.append(replace(one, label=f"{one.label} #{twins + 1}") if twins else one)
            continue
        # Ranks of a job that share a host have its name as their label.
        if hosts[same].label.split(" #")[0] != one.label:
            doubles.append((hosts[same].label, one.label))
        hosts[same] = hosts[same].joined_by(one)
    found: list[Link] = []
    for number, blob in enumerate(links):
        try:
            read = [decode_link(value) for value in read_json(blob)] if blob else []
        except (ValueError, TypeError) as error:
            missing[f"host {number}"] = f"its probes are unreadable ({error}): another version?"
            continue
        inside = range(len(hosts))
        found += [one for one in read if one.source in inside and one.target in inside]
    return Survey(hosts, found, missing, doubles)


def survey_here(ranks: int = 0) -> Survey:
    """Return the survey of this host alone."""
    return Survey([collect_facts("", ranks)])


def take_part(gather: Gather, label: str = "", ranks: int = 0) -> Survey:
    """Be the doctor of this host in a survey of several; returns the same survey on all of them.

    Raises the errors of ``gather``. Each step between two rounds takes bounded time.
    """
    try:
        ports = Config.read().port_range
    except PycollError:
        # The facts of this host tell what is wrong with its settings.
        ports = None
    try:
        responder = Responder(ports)
    except PycollError as error:
        unheard = (0, os.urandom(TOKEN_BYTES).hex())
        return _survey(gather, collect_facts(label, ranks, unheard).with_problem(str(error)))
    with responder:
        listener = (responder.port, responder.token.hex())
        return _survey(gather, collect_facts(label, ranks, listener))


def _survey(gather: Gather, mine: HostFacts) -> Survey:
    facts = gather(mine.encode())
    hosts = survey_of(facts).hosts
    own = next((at for at, one in enumerate(hosts) if one.token == mine.token), None)
    prober = None if own is None else Prober(own, hosts)
    if prober is not None:
        prober.connect()
    for turn in range(1, min(len(hosts) - 1, RATES_MAX) + 1):
        # Every host sends to one other and receives from one other at a time.
        gather(b"-")
        if own is not None and prober is not None:
            prober.measure((own + turn) % len(hosts))
    links = [] if prober is None else [asdict(link) for link in prober.links]
    return survey_of(facts, gather(json.dumps(links).encode()))
