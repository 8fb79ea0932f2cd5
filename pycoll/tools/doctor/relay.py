"""Starts a doctor on each host, over ssh or here, and relays what they send to each other.

A host that cannot be reached, or whose doctor ends, leaves the survey with its reason, and the
others go on without it. So does a host that is silent for longer than a round may take.
"""

from __future__ import annotations

import base64
import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pycoll.launch.host_list import HostSlots
from pycoll.launch.host_notes import NoteFilter, new_mark, write_order
from pycoll.launch.host_starts import HostsOptions, agent_line, failure_of, forwarded_variables
from pycoll.tools.doctor.probes import CONNECT_S, ELSEWHERE_S, TALKS_S
from pycoll.tools.doctor.survey import Survey, survey_of

_AGENT = "pycoll.tools.doctor.probe_agent"
#: Seconds for a round behind the first: its probes, and what a slow host adds.
_ROUND_S = CONNECT_S + ELSEWHERE_S + TALKS_S + 15.0
#: Seconds that a doctor has to end after the last round.
_END_S = 2.0
_WORDS_MAX = 4096


class _Host:
    """The doctor of one host, as the relay sees it."""

    def __init__(self, host: HostSlots, process: subprocess.Popen[bytes]) -> None:
        self.host, self.process = host, process
        self.words = b""
        self.reason = ""

    def order(self, data: dict[str, Any]) -> None:
        """Send an order; a doctor that has ended is found out by the end of its output."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError, ValueError):
            write_order(self.process.stdin.fileno(), data)

    def keep_words(self) -> None:
        """Read stderr to its end, for an error text."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.words = (self.words + line)[-_WORDS_MAX:]


class Relay:
    """Runs one survey. ``run`` is called once; a thread per host serves its doctor."""

    def __init__(self, options: HostsOptions) -> None:
        self._options = options
        self._mark = new_mark()
        self._hosts: list[_Host] = []
        self._rounds: list[dict[int, bytes]] = []
        self._alive: set[int] = set()
        self._change = threading.Condition()

    def run(self) -> Survey:
        """Return the survey. Raises InvalidArgumentError for options that cannot work."""
        environment = forwarded_variables(os.environ, self._options)
        servers: list[threading.Thread] = []
        try:
            for host in self._options.hosts:
                self._start(host)
            servers += [
                threading.Thread(target=self._serve, args=(number, environment), daemon=True)
                for number in range(len(self._hosts))
            ]
            self._alive = set(range(len(self._hosts)))
            for server in servers:
                server.start()
            self._await(servers)
        finally:
            for one in self._hosts:
                self._end(one)
            if not any(server.is_alive() for server in servers):
                self._close_pipes()
        return self._result()

    def _await(self, servers: Sequence[threading.Thread]) -> None:
        """Wait until all doctors have ended or left. A process that ssh leaves behind may hold the
        output of one that was killed."""
        while any(server.is_alive() for server in servers):
            with self._change:
                if not self._alive:
                    break
                self._change.wait(1.0)
        until = time.monotonic() + _END_S
        for server in servers:
            server.join(max(0.0, until - time.monotonic()))

    def _start(self, host: HostSlots) -> None:
        line = agent_line(host, self._options, _AGENT)
        if self._options.verbose:
            print(f"pycoll doctor: host {host.name}: {' '.join(line)}", file=sys.stderr)
        pipe = subprocess.PIPE
        self._hosts.append(
            _Host(host, subprocess.Popen(line, stdin=pipe, stdout=pipe, stderr=pipe))
        )

    def _serve(self, number: int, environment: Mapping[str, str]) -> None:
        """Talk to one doctor until its output ends or it has left the survey."""
        one = self._hosts[number]
        words = threading.Thread(target=one.keep_words, daemon=True)
        words.start()
        watch = self._watch(number, self._options.start_timeout_s)
        one.order(
            {
                "mark": self._mark,
                "host": one.host.name,
                "slots": one.host.slots,
                "environment": dict(environment),
            }
        )
        notes: list[Any] = []
        reader = NoteFilter(self._mark, notes.append)
        assert one.process.stdout is not None
        round_ = 0
        while piece := os.read(one.process.stdout.fileno(), 1 << 16):
            reader.rest(piece)
            for note in notes:
                watch.cancel()
                blobs = self._gather(number, round_, base64.b64decode(note["blob"]))
                round_ += 1
                coded = [base64.b64encode(blob).decode() for blob in blobs]
                one.order({"blobs": coded})
                # Later than the other doctors notice it, for one that has no others.
                watch = self._watch(number, 2 * _ROUND_S)
            notes.clear()
        watch.cancel()
        one.process.wait()
        words.join(1.0)
        with self._change:
            if one.process.returncode and not one.reason:
                text = one.words.decode(errors="replace").strip()
                one.reason = failure_of(one.host, one.process.returncode, text)
            self._alive.discard(number)
            self._change.notify_all()

    def _watch(self, number: int, limit: float) -> threading.Timer:
        """Return a timer that ends a doctor which has not answered in time."""
        start = "" if self._rounds else " (--start-timeout sets it)"
        reason = f"no answer within {limit:g} s{start}"
        watch = threading.Timer(limit, self._drop, (number, reason))
        watch.daemon = True
        watch.start()
        return watch

    def _drop(self, number: int, reason: str) -> None:
        one = self._hosts[number]
        with self._change:
            one.reason = one.reason or f"host {one.host.name}: {reason}"
            self._alive.discard(number)
            self._change.notify_all()
        one.process.kill()

    def _gather(self, number: int, round_: int, blob: bytes) -> Sequence[bytes]:
        """Add a blob to a round and return those of all hosts, once they are there."""
        limit = _ROUND_S if round_ else self._options.start_timeout_s + 1.0
        with self._change:
            while len(self._rounds) <= round_:
                self._rounds.append({})
            found = self._rounds[round_]
            found[number] = blob
            self._change.notify_all()
            until = time.monotonic() + limit
            while not self._alive <= found.keys() and time.monotonic() < until:
                self._change.wait(until - time.monotonic())
            late = self._alive - found.keys()
        for other in late:
            self._drop(other, f"no answer within {limit:g} s during the probes")
        return [found.get(other, b"") for other in range(len(self._hosts))]

    def _end(self, one: _Host) -> None:
        with contextlib.suppress(BrokenPipeError):
            if one.process.stdin is not None:
                one.process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            one.process.wait(_END_S)
        one.process.kill()
        one.process.wait()

    def _close_pipes(self) -> None:
        for one in self._hosts:
            for pipe in (one.process.stdout, one.process.stderr):
                if pipe is not None:
                    pipe.close()

    def _result(self) -> Survey:
        numbers = range(len(self._hosts))
        first = self._rounds[0] if self._rounds else {}
        absent = {}
        for number, one in enumerate(self._hosts):
            if one.reason or number not in first:
                silent = f"host {one.host.name}: its doctor ended without an answer"
                absent[one.host.name] = one.reason or silent
        last = self._rounds[-1] if len(self._rounds) > 1 else {}
        links = [last.get(number, b"") for number in numbers]
        found = survey_of([first.get(number, b"") for number in numbers], links, absent)
        return replace(found, listed=True)
