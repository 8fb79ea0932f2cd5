"""``pycoll doctor``: chooses how the doctors meet, prints the report, and returns the status."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import click

from pycoll.bootstrap.deadline import Deadline
from pycoll.bootstrap.discovery.discover import discover, inside_job, open_exchange
from pycoll.bootstrap.discovery.network import parse_address, resolve
from pycoll.bootstrap.rendezvous.exchange import Exchange
from pycoll.bootstrap.rendezvous.store import StoreExchange
from pycoll.bootstrap.rendezvous.torch_store import TorchStoreExchange
from pycoll.config import Config
from pycoll.errors import PycollError
from pycoll.launch.host_starts import HostsOptions
from pycoll.launch.node_meeting import NodeOptions, enter_meeting
from pycoll.tools.doctor.checks import findings_of
from pycoll.tools.doctor.relay import Relay
from pycoll.tools.doctor.survey import Gather, Survey, survey_here, take_part
from pycoll.tools.doctor.survey_report import as_json, as_text, is_wrong

#: Seconds for all rounds of a survey once the nodes have met.
_SURVEY_S = 180.0


class Wishes(NamedTuple):
    """``ranks`` are planned for this host. At most one of ``hosts`` and ``node`` is given; without
    both, the doctor examines the hosts of the job that it is in, or this host."""

    ranks: int
    as_json: bool
    hosts: HostsOptions | None = None
    node: NodeOptions | None = None


def run_doctor(wishes: Wishes) -> int:
    """Print the report; returns 1 if something is wrong, else 0. Raises pycoll's errors.

    Of the ranks of a job, rank 0 prints and returns that status, and the others return 0: a
    launcher may end the whole job as soon as one rank fails, before rank 0 has printed.
    """
    prints = True
    if wishes.hosts is not None:
        survey = Relay(wishes.hosts).run()
    elif wishes.node is not None:
        survey = _of_nodes(wishes.node, wishes.ranks)
    elif inside_job():
        prints, survey = _of_job()
    else:
        survey = survey_here(wishes.ranks)
    if not prints:
        return 0
    click.echo(as_json(survey) if wishes.as_json else as_text(survey))
    return int(is_wrong(findings_of(survey)))


def _of_nodes(options: NodeOptions, ranks: int) -> Survey:
    """Meet the doctors of the other nodes. If that fails, return what is wrong here, and why."""
    options.check()
    try:
        exchange = enter_meeting(options, Deadline(options.start_timeout_s))
        try:
            return take_part(_rounds_of(exchange), ranks=ranks)
        finally:
            exchange.close()
    except PycollError as error:
        here = survey_here(ranks)
        where = f"node {options.node} ({here.hosts[0].label})"
        return replace(here, absent={where: f"{error}{_address_warning(options)}"})


def _rounds_of(exchange: Exchange) -> Gather:
    """Return the rounds of a survey over an exchange. The first one waits for doctors that start
    late, within the deadline of the exchange, and the others for probes."""

    def gather(blob: bytes) -> Sequence[bytes]:
        blobs = exchange.all_gather(blob)
        if isinstance(exchange, StoreExchange | TorchStoreExchange):
            exchange.prolong(Deadline(_SURVEY_S))
        return blobs

    return gather


def _address_warning(options: NodeOptions) -> str:
    """Return what is odd about the address where the nodes meet, as this node sees it."""
    host, port = parse_address(options.address)
    try:
        found = [str(address[0]) for _, address in resolve(host, port)]
    except PycollError:
        return ""
    loopback = [one for one in found if one == "::1" or one.startswith("127.")]
    if options.node == 0 or not loopback or host in loopback:
        return ""
    return f"; {host} resolves to {loopback[0]} on this node, which is the node itself"


def _of_job() -> tuple[bool, Survey]:
    """Examine the hosts of the job that this process is a rank of. Rank 0 prints.

    The doctors meet by any interface, also by one that PYCOLL_INTERFACES leaves out, so that they
    can report that the others lead nowhere.
    """
    config = Config.read()._replace(interfaces=())
    placement = discover(config)
    exchange = open_exchange(placement, config, Deadline(config.init_timeout_s))
    try:
        survey = take_part(_rounds_of(exchange), socket.gethostname(), ranks=1)
    finally:
        exchange.close()
    return placement.rank == 0, survey
