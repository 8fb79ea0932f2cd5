"""``pycoll tune`` by all ranks of a job on several hosts: what their network costs.

First one rank per host, alone: what a message between hosts takes, and what one rank carries. Then,
where hosts have more ranks, groups of one rank per host side by side, as many as fit: what a host's
link carries. Then each host by itself, all at once: their shared memory. What a case took is the
time of the slowest group. Rank 0 fits (see fit) and tells; every host stores what it told, so that
a job gets the same table whichever host has its rank 0.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from pycoll import tuning
from pycoll.bench.command import progress_bar
from pycoll.bench.fit import Fit, Observation, fit
from pycoll.bench.metrics import Measurement
from pycoll.bench.sweep import SweepOptions, hosts_of, measure
from pycoll.bench.tune import (
    COLLECTIVES,
    SEGMENTS,
    Case,
    Times,
    accuracy,
    best_segment,
    describe,
    distinct_algorithms,
    observations,
    place_to_store,
    present,
    spills_from,
)
from pycoll.bootstrap.identity import ranks_per_core, transport_across
from pycoll.errors import InvalidArgumentError, PycollError
from pycoll.model import LINKS, SEGMENT_BYTES, Link
from pycoll.tuning import Medium, Network, Tuning

if TYPE_CHECKING:
    from pycoll.communicator import Communicator
    from pycoll.topology import Topology

_T = TypeVar("_T")

#: What tells the cost of a segment from that of its bytes, and which is better.
_SEGMENTS = (SEGMENTS[0], SEGMENTS[-1])
#: From here on bytes are what a message takes; shorter ones say nothing about a host's link.
_LONG_BYTES = 1 << 18
#: What fills a link before times count: the bucket of a virtual machine's network, or of tc-tbf.
_SUSTAINED_S = 0.02
#: Which length of segments is better shows where messages are cut in several.
_CUT_BYTES = 1 << 18


@dataclass(frozen=True)
class Phase:
    """Groups that measure side by side. ``colors``: each rank's group; None if it only waits."""

    name: str
    colors: tuple[int | None, ...]
    begin_bytes: int
    segments: tuple[int, ...]
    beside: int = 0

    @property
    def size(self) -> int:
        """Ranks of the largest group."""
        return max(self.colors.count(color) for color in self.colors if color is not None)


@dataclass(frozen=True)
class HostsOptions:
    """What to measure, and where rank 0 stores instead of every host in its cache."""

    quick: bool = False
    path: Path | None = None

    @property
    def end_bytes(self) -> int:
        """The longest message."""
        return 1 << 19 if self.quick else 1 << 22

    def sizes(self, phase: Phase) -> list[int]:
        """Messages, ascending; the longest is always one."""
        found, factor = [self.end_bytes], 8 if self.quick else 4
        while found[-1] // factor >= phase.begin_bytes:
            found.append(found[-1] // factor)
        return found[::-1]

    def sweep(self, collective: str, phase: Phase) -> SweepOptions:
        """Side by side, all groups take equally many samples, so that they stay together. Between
        hosts a burst may be carried that says nothing of the rate."""
        few = self.quick or phase.beside > 1
        return SweepOptions(
            collective=collective,
            samples=5 if few else 15,
            budget_s=0.0 if few else 0.25,
            sustained_s=_SUSTAINED_S if phase.beside else 0.0,
        )


def phases_of(topology: Topology, crowding: float = 1) -> list[Phase]:
    """What is measured on these ranks, alike on all of them.

    ``crowding``: ranks per core. Where they share cores, what shared memory takes is not measured:
    the model makes that up for any number of ranks from what it takes them with a core each.
    """
    ranks = range(topology.size)
    least = min(len(members) for members in topology.hosts)
    places = topology.places
    leaders = tuple(0 if places[rank] == 0 else None for rank in ranks)
    found = [Phase("one rank per host", leaders, 32, _SEGMENTS, 1)]
    if least > 1:
        by_place = tuple(places[rank] if places[rank] < least else None for rank in ranks)
        found.append(Phase(f"{least} ranks per host", by_place, _LONG_BYTES, _SEGMENTS[:1], least))
        if crowding <= 1:
            hosts = tuple(topology.host_of(rank) for rank in ranks)
            found.append(Phase("inside hosts", hosts, 32, _SEGMENTS))
    return found


class HostsTuner:
    """This rank's part in measuring a job's links. ``say`` prints a line; only rank 0 does."""

    def __init__(
        self, comm: Communicator, options: HostsOptions, say: Callable[[str], None]
    ) -> None:
        self._comm = comm
        self._topology = hosts_of(comm)
        self._options = options
        self._say = say if comm.rank == 0 else lambda _: None
        self._progress = progress_bar()
        self._progress.disable = self._progress.disable or comm.rank != 0
        #: By phase; complete on all ranks.
        self._times: dict[str, Times] = {}

    def run(self) -> Network:
        """Measure; the same on all ranks. PycollError on all if a result was wrong."""
        phases = phases_of(self._topology, ranks_per_core(self._comm._identities))
        total = sum(len(list(self._cases(phase))) * len(phase.segments) for phase in phases)
        task = self._progress.add_task("measuring", total=total)
        with self._progress:
            for phase in phases:
                self._progress.update(task, description=phase.name)
                self._measure(phase, lambda: self._progress.advance(task))
        told = b""
        if self._comm.rank == 0:
            told = json.dumps(tuning.network_as_json(self._fitted(phases))).encode()
        return tuning.network_from_json(json.loads(self._comm._gather_blobs(told)[0]))

    def _cases(self, phase: Phase) -> Iterator[tuple[str, int, list[str]]]:
        """(collective, bytes, algorithms) in order; equally many for groups of other sizes."""
        for collective in COLLECTIVES:
            for nbytes in self._options.sizes(phase):
                if phase.beside > 1:
                    # One at a time: groups would not be at the same one otherwise.
                    for name in distinct_algorithms(collective, phase.size):
                        yield collective, nbytes, [name]
                else:
                    yield collective, nbytes, []

    def _measure(self, phase: Phase, advance: Callable[[], None]) -> None:
        """Fill this phase's times, with those of all groups."""
        lines: list[tuple[int, Measurement]] = []
        for segment_bytes in phase.segments:
            group = self._group(phase, segment_bytes)
            for collective, nbytes, names in self._cases(phase):
                # Also for those who only wait: no wait gets longer than one case.
                self._comm.barrier()
                if group is not None:
                    chosen = names or distinct_algorithms(collective, group.size)
                    sweep = self._options.sweep(collective, phase)
                    found = list(measure(group, sweep, chosen, nbytes))
                    lines += [(segment_bytes, line) for line in found if group.rank == 0]
                advance()
            if group is not None:
                group.close()
        told = [[segment_bytes, asdict(line)] for segment_bytes, line in lines]
        for blob in self._comm._gather_blobs(json.dumps(told).encode()):
            for segment_bytes, line in json.loads(blob):
                self._take(phase, segment_bytes, Measurement(**line))

    def _group(self, phase: Phase, segment_bytes: int) -> Communicator | None:
        media = {name: Medium(LINKS[name], segment_bytes) for name in tuning.BUILT_IN.media}
        text = Tuning(media, "being measured").to_text()
        return self._comm._split(phase.colors[self._comm.rank], 0, text)

    def _take(self, phase: Phase, segment_bytes: int, line: Measurement) -> None:
        if line.wrong:
            raise PycollError(
                f"measuring {line.collective} by {line.algorithm} with {phase.name} gave "
                f"{line.wrong} wrong elements; nothing was stored"
            )
        name, nbytes = line.algorithm, line.bytes
        case = Case(line.collective, name, line.ranks, nbytes, segment_bytes, phase.beside)
        times = self._times.setdefault(phase.name, {})
        # Where groups disturb each other on purpose, those that were alone for a while say nothing.
        seconds = line.median_s if phase.beside > 1 else line.quartile_s
        times[case] = max(seconds, times.get(case, 0.0))

    def _fitted(self, phases: Sequence[Phase]) -> Network:
        alone, *more = phases
        transport = transport_across(self._comm._identities)
        found = fit(self._observed(alone.name), LINKS[transport])
        across = found.link
        for phase in more:
            if phase.beside:
                across = with_whole_link(across, self._observed(phase.name))
        medium = Medium(across, self._segment(alone.name))
        self._tell(transport, medium, alone.name, found)
        inside = None
        for phase in more:
            if not phase.beside:
                found = fit(self._observed(phase.name), LINKS["shm"], spills_from=spills_from())
                inside = Medium(found.link, self._segment(phase.name))
                self._tell("inside", inside, phase.name, found)
        hosts = {name.rpartition(":")[0] for name in self._comm._names}
        made = datetime.date.today().isoformat()
        return Network(tuple(sorted(hosts)), transport, medium, inside, made)

    def _observed(self, phase: str) -> list[Observation]:
        return observations(self._times[phase])

    def _segment(self, phase: str) -> int:
        times = self._times[phase]
        cut = {case: s for case, s in times.items() if case.nbytes >= _CUT_BYTES}
        return best_segment(cut) if cut else SEGMENT_BYTES

    def _tell(self, word: str, medium: Medium, phase: str, found: Fit) -> None:
        for line in (*describe(word, medium), *accuracy(list(self._times[phase]), found)):
            self._say(line)


def with_whole_link(one: Link, together: Sequence[Observation]) -> Link:
    """What one rank takes, and of its host's link what all ranks together made of it.

    Times of few, long messages do not tell a segment's cost from that of its bytes, so what a
    message costs besides its bytes stays as it was for one rank.
    """
    return fit(together, one, ("beta", "spill")).link._replace(flow=one.beta)


def run_tune_hosts(options: HostsOptions, say: Callable[[str], None]) -> Network:
    """Measure the links of the job that this process is a rank of, and store what was found.

    Called by all its ranks, and equal on all. InvalidArgumentError, on all, for a job on one host
    and before anything is measured if a host could not store; PycollError if a result was wrong or
    a host could not store after all.
    """
    import pycoll

    comm = pycoll.init()
    try:
        topology = hosts_of(comm)
        if len(topology.hosts) == 1:
            raise InvalidArgumentError(
                "all ranks of this job are on one host: run pycoll tune outside of a job, or with "
                "--ranks, to measure a machine by itself"
            )
        leads = topology.local_rank(comm.rank) == 0 if options.path is None else comm.rank == 0
        path = _agreed(comm, lambda: place_to_store(options.path) if leads else None)
        if comm.rank == 0:
            say(f"measuring links between {len(topology.hosts)} hosts with {comm.size} ranks")
        network = HostsTuner(comm, options, say).run()
        _agreed(comm, lambda: _store(network, path))
        if comm.rank == 0:
            where = f"on every host, here in {path}" if options.path is None else f"in {path}"
            say(f"stored {where}, for {network}")
        return network
    finally:
        pycoll.finalize()


def _store(network: Network, path: Path | None) -> None:
    if path is None:
        return
    try:
        tuning.store(present(path).with_network(network), path, network.made)
    except OSError as error:
        raise InvalidArgumentError(f"cannot store {str(path)!r}: {error.strerror}") from None


def _agreed(comm: Communicator, act: Callable[[], _T]) -> _T | None:
    """What ``act`` gives. InvalidArgumentError on all ranks if it raised that on one."""
    found, refusal = None, ""
    try:
        found = act()
    except InvalidArgumentError as error:
        refusal = f"host {comm._names[comm.rank].rpartition(':')[0]}: {error}"
    told = [blob.decode() for blob in comm._gather_blobs(refusal.encode()) if blob]
    if told:
        more = f"; and {len(told) - 1} more hosts" if len(told) > 1 else ""
        raise InvalidArgumentError(told[0] + more)
    return found
