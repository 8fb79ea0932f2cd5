"""Elastic jobs from one command: starts agents on hosts that come, while the job runs.

The agent of the first host becomes node 0, which decides what runs where (elastic_jobs.py). The
launcher starts the agents of further hosts and tells each agent how many slots its host has. An
agent that ends is the loss of its host only, unless it is that of node 0.
"""

from __future__ import annotations

import dataclasses
import time

from pycoll.errors import InvalidArgumentError
from pycoll.launch.elastic_jobs import ElasticOptions, too_few
from pycoll.launch.host_list import HostSlots
from pycoll.launch.host_script import HostScript, command_of
from pycoll.launch.host_starts import HostAgent, HostsJob, HostsOptions, Work
from pycoll.launch.node_meeting import Verdict
from pycoll.launch.rank_crew import say

#: Seconds that the other agents have to end after that of node 0 has ended.
_LAST_S = 8.0


def launch_elastic(options: HostsOptions, work: Work, ranks: int) -> Verdict | None:
    """Run an elastic job of ``ranks`` ranks at the start and wait; returns its failure, or None if
    it ended well.

    Without a script the hosts are fixed, and the errors of ``launch_on_hosts`` are raised if an
    agent does not start. With one, such a host is reported and left out.
    """
    elastic = work.elastic or ElasticOptions()
    elastic.check(ranks)
    if options.discovery is not None:
        command_of(options.discovery)
    most = elastic.ranks_max
    if not elastic.grows:
        most = most or ranks
    limits = dataclasses.replace(elastic, ranks_min=elastic.ranks_min or ranks, ranks_max=most)
    with _ElasticHosts(options, dataclasses.replace(work, elastic=limits)) as job:
        if options.discovery is None:
            if not job.await_answers():
                return job.stop_early()
            job.go_all()
        return job.run(limits)


class _ElasticHosts(HostsJob):
    """The agents of an elastic job. Each host has at most one that runs."""

    def __init__(self, options: HostsOptions, work: Work) -> None:
        super().__init__(options, work)
        #: The slots of each host, as the script has named them last; None before.
        self._wanted: dict[str, int] | None = None
        self._current: dict[str, HostAgent] = {}
        #: The slots that each agent knows.
        self._told: dict[str, int] = {}
        #: Hosts that are not used until the script has left them out.
        self._failed: set[str] = set()
        self._answer_by: dict[HostAgent, float] = {}
        self._first: HostAgent | None = None
        self._nodes = 0
        self._joined = 0
        self._script: HostScript | None = None

    def go_all(self) -> None:
        """Let the agents of a fixed list of hosts join."""
        super().go_all()
        self._current = {agent.host.name: agent for agent in self._agents}
        self._first, self._joined = self._agents[0], len(self._agents)

    def run(self, limits: ElasticOptions) -> Verdict | None:
        """Start agents on hosts that come, until node 0 has ended; returns the job's failure."""
        self._begin_pulse()
        if self._options.discovery is not None:
            self._script = HostScript(
                self._options.discovery, self._selector, self._note_hosts, say
            )
            self._undo.callback(self._script.close)
        last: float | None = None
        until = time.monotonic() + limits.patience_s
        while last is None or (time.monotonic() < last and not self._are_all_ended()):
            if self._script is not None and last is None:
                self._script.advance()
                self._adapt()
            self._watch_once()
            if self._first is None:
                if self.signals or self._passed_on:
                    return self._stop_before()
                if time.monotonic() >= until and not self._answer_by:
                    least = limits.ranks_min or 1
                    return Verdict(too_few(limits.patience_s, 0, least), 1)
            elif not self._is_node_0_ending(self._first):
                last = None
            elif last is None:
                last = time.monotonic() + _LAST_S
        return self._conclude(self._first)

    def _are_all_ended(self) -> bool:
        return all(agent.ended for agent in self._current.values())

    def _stop_before(self) -> Verdict:
        if self._passed_on and not self.signals:
            self.signals.append(self._passed_on)
        return self.stop_early()

    def _note_hosts(self, hosts: dict[str, int]) -> None:
        self._wanted = hosts
        self._failed &= hosts.keys()

    def _adapt(self) -> None:
        """Bring the agents in line with the hosts that the script has named."""
        if self._wanted is None:
            return
        self._note_ends()
        for name, slots in self._wanted.items():
            if name not in self._current and name not in self._failed:
                self._begin_host(HostSlots(name, slots))
        for agent in list(self._answer_by):
            self._take_answer(agent)
        if self._first is None and not self._answer_by:
            self._begin_job()
        for name, agent in self._current.items():
            slots = self._wanted.get(name, 0)
            if agent.started and self._told[name] != slots:
                self._told[name] = slots
                agent.send(slots=slots)

    def _begin_host(self, host: HostSlots) -> None:
        # Any of the first hosts may become node 0.
        agent = self._start(host, self._first is None)
        self._current[host.name] = agent
        self._told[host.name] = host.slots
        self._answer_by[agent] = time.monotonic() + self._options.start_timeout_s

    def _note_ends(self) -> None:
        for name, agent in list(self._current.items()):
            if not agent.ended or agent is self._first:
                continue
            if agent in self._answer_by:
                self._give_up(agent, agent.failure())
                continue
            if agent.process.returncode != 0:
                why = "" if agent.verdict is None else f": {agent.verdict.text}"
                self._give_up(agent, f"host {name}: its agent has ended{why}")
                continue
            # Its slots were taken away, and its last rank has ended.
            self._forget(agent)

    def _take_answer(self, agent: HostAgent) -> None:
        """Let an agent join that has answered, or give up one that is too late."""
        name = agent.host.name
        if agent.facts is None:
            if time.monotonic() >= self._answer_by[agent]:
                limit = f"{self._options.start_timeout_s:g} s (--start-timeout sets it)"
                self._give_up(agent, f"host {name}: no answer within {limit}")
            return
        try:
            self._compare(agent)
        except InvalidArgumentError as error:
            self._give_up(agent, str(error))
            return
        del self._answer_by[agent]
        if self._first is not None:
            self._join(agent)

    def _begin_job(self) -> None:
        """Let all agents that have answered join; the first of them becomes node 0."""
        agents = list(self._current.values())
        if agents:
            self._first, self._nodes = agents[0], len(agents)
            for agent in agents:
                self._join(agent)

    def _join(self, agent: HostAgent) -> None:
        assert self._first is not None
        self._go(agent, self._joined, self._first, self._nodes)
        self._joined += 1

    def _give_up(self, agent: HostAgent, text: str) -> None:
        """Leave out a host until the script has left it out and named it again."""
        self._failed.add(agent.host.name)
        self._forget(agent)
        agent.let_go()
        say(f"{text}; it is not used until the script has left it out")

    def _forget(self, agent: HostAgent) -> None:
        name = agent.host.name
        self._answer_by.pop(agent, None)
        del self._current[name]
        if agent.facts is not None and self._machines.get(agent.facts["machine"]) == name:
            del self._machines[agent.facts["machine"]]
