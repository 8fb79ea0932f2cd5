"""``pycoll tune`` by all ranks of a job on several hosts: measures the network between the hosts.

First one rank per host runs alone: this measures messages between hosts, and the rate of one rank.
If all hosts have several ranks, as many groups of one rank per host as possible run at the same
time: this measures the link of a host. Then each host runs by itself, all hosts at the same time:
this measures shared memory, with ordinary arrays and with arrays that peers read in place. At last
one rank per host measures codecs, of which the slowest host counts.

A job on one host may have ranks that are bound to cores of several domains (caches or memory). Then
domains take the place of hosts in all of this, and peers read all arrays in place, as the choice of
an algorithm assumes.

The time of a case is the time of the slowest group. Rank 0 fits the link (see fit.py) and sends the
result to all ranks. Every host stores it, so a job gets the same table whichever host has its rank
0.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from pycoll.arrays.registry import shared_arrays
from pycoll.bootstrap.discovery.identity import Identity, ranks_per_core, transport_across
from pycoll.comm.operations import internals_of
from pycoll.cost import codec_rates, tuning_file
from pycoll.cost.codec_rates import CodecRate
from pycoll.cost.model import LINKS, SEGMENT_BYTES, Link
from pycoll.cost.selection import MEMORIES, ORDINARY, SHARED
from pycoll.cost.slot_stores import slot_stores_of
from pycoll.cost.tuning_file import DOMAINS, Medium, Network, Tuning
from pycoll.errors import InvalidArgumentError, PycollError
from pycoll.tools.bench.command import progress_bar
from pycoll.tools.bench.measuring import BenchOptions, hosts_of, measure
from pycoll.tools.bench.metrics import Measurement
from pycoll.tools.tune.codec_speed import describe_codecs, measured_rates
from pycoll.tools.tune.fit import Fit, Observation, fit
from pycoll.tools.tune.machine_links import (
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

if TYPE_CHECKING:
    from pycoll.comm.communicator import Communicator
    from pycoll.schedule.topology import Topology

_T = TypeVar("_T")

#: Two segment lengths, which separate the cost of a segment from that of its bytes.
_SEGMENTS = (SEGMENTS[0], SEGMENTS[-1])
#: From this size on the bytes of a message determine its time; shorter messages do not measure the
#: link of a host.
_LONG_BYTES = 1 << 18
#: The time in s for which an algorithm runs before its times count. It empties the token bucket of
#: a shaped link, such as that of a virtual machine or of tc-tbf.
_SUSTAINED_S = 0.02
#: From this size on messages have several segments, so times show the better segment length.
_CUT_BYTES = 1 << 18


@dataclass(frozen=True)
class Phase:
    """Groups that measure at the same time.

    ``colors``: the group of each rank, or None for a rank that only waits. ``concurrent``: the
    number of groups across hosts; 0 for groups inside hosts. ``memories``: the memories of the
    arrays, values of MEMORIES.
    """

    name: str
    colors: tuple[int | None, ...]
    begin_bytes: int
    segments: tuple[int, ...]
    concurrent: int = 0
    memories: tuple[str, ...] = (ORDINARY,)

    @property
    def size(self) -> int:
        """The number of ranks of the largest group."""
        return max(self.colors.count(color) for color in self.colors if color is not None)


@dataclass(frozen=True)
class HostsOptions:
    """The extent of a measurement, and where to store the result.

    If ``path`` is set, rank 0 writes this file; otherwise every host writes a file in its cache.
    """

    quick: bool = False
    path: Path | None = None

    @property
    def end_bytes(self) -> int:
        """The length of the longest message in bytes."""
        return 1 << 19 if self.quick else 1 << 22

    def sizes(self, phase: Phase) -> list[int]:
        """The message sizes, ascending; the longest message is always included."""
        found, factor = [self.end_bytes], 8 if self.quick else 4
        while found[-1] // factor >= phase.begin_bytes:
            found.append(found[-1] // factor)
        return found[::-1]

    def bench_options(self, collective: str, phase: Phase) -> BenchOptions:
        """The options for a collective in this phase.

        Concurrent groups take the same number of samples, so that they stay together. Between hosts
        a warm-up excludes bursts, which exceed the sustained rate.
        """
        few = self.quick or phase.concurrent > 1
        return BenchOptions(
            collective=collective,
            samples=5 if few else 15,
            budget_s=0.0 if few else 0.25,
            sustained_s=_SUSTAINED_S if phase.concurrent else 0.0,
        )


def phases_of(
    topology: Topology, oversubscription: float = 1, one_host: bool = False
) -> list[Phase]:
    """The phases of a measurement on these ranks, equal on all ranks.

    ``oversubscription``: ranks per core. If ranks share cores, shared memory is not measured: the
    model derives its costs for any number of ranks per core from the costs with one rank per core.
    ``one_host``: the hosts of ``topology`` are domains of one host.
    """
    memories = (SHARED,) if one_host else (ORDINARY,)
    ranks = range(topology.size)
    least = min(len(members) for members in topology.hosts)
    places = topology.places
    first_ranks = tuple(0 if places[rank] == 0 else None for rank in ranks)
    found = [Phase("one rank per host", first_ranks, 32, _SEGMENTS, 1, memories)]
    if least > 1:
        by_place = tuple(places[rank] if places[rank] < least else None for rank in ranks)
        name = f"{least} ranks per host"
        found.append(Phase(name, by_place, _LONG_BYTES, _SEGMENTS[:1], least, memories))
        if oversubscription <= 1:
            hosts = tuple(topology.host_of(rank) for rank in ranks)
            found.append(Phase("inside hosts", hosts, 32, _SEGMENTS, memories=MEMORIES))
    return found


class HostsTuner:
    """The part of this rank in measuring a job's links; ``say`` prints a line, on rank 0 only."""

    def __init__(
        self, comm: Communicator, options: HostsOptions, say: Callable[[str], None]
    ) -> None:
        self._comm = comm
        self._topology = hosts_of(comm).by_domain
        self._options = options
        self._say = say if comm.rank == 0 else lambda _: None
        self._progress = progress_bar()
        self._progress.disable = self._progress.disable or comm.rank != 0
        #: The times of each phase, complete on all ranks.
        self._times: dict[str, Times] = {}

    def run(self) -> Network:
        """Measures all phases; the result is equal on all ranks.

        Raises PycollError on all ranks if a result was wrong.
        """
        oversubscription = ranks_per_core(_identities(self._comm))
        phases = phases_of(self._topology, oversubscription, len(self._comm.hosts) == 1)
        total = sum(
            len(list(self._cases(phase))) * len(phase.segments) * len(phase.memories)
            for phase in phases
        )
        task = self._progress.add_task("measuring", total=total)
        with self._progress:
            for phase in phases:
                self._progress.update(task, description=phase.name)
                self._measure(phase, lambda: self._progress.advance(task))
        blob = b""
        if self._comm.rank == 0:
            blob = json.dumps(tuning_file.network_as_json(self._fit_network(phases))).encode()
        return tuning_file.network_from_json(json.loads(_gather(self._comm, blob)[0]))

    def _cases(self, phase: Phase) -> Iterator[tuple[str, int, list[str]]]:
        """(collective, bytes, algorithms) of every case, in order.

        Groups of different sizes have the same number of cases.
        """
        for collective in COLLECTIVES:
            for nbytes in self._options.sizes(phase):
                if phase.concurrent > 1:
                    # One algorithm per case, so that all groups run the same one.
                    for name in distinct_algorithms(collective, phase.size):
                        yield collective, nbytes, [name]
                else:
                    yield collective, nbytes, []

    def _measure(self, phase: Phase, advance: Callable[[], None]) -> None:
        """Fills the times of this phase with those of all groups."""
        lines: list[tuple[int, str, Measurement]] = []
        for segment_bytes in phase.segments:
            group = self._group(phase, segment_bytes)
            for memory, (collective, nbytes, names) in product(phase.memories, self._cases(phase)):
                # Waiting ranks take part too, so no wait is longer than one case.
                self._comm.barrier()
                if group is not None:
                    chosen = names or distinct_algorithms(collective, group.size)
                    options = self._options.bench_options(collective, phase)
                    with shared_arrays() if memory == SHARED else nullcontext():
                        found = list(measure(group, options, chosen, nbytes))
                    if group.rank == 0:
                        lines += [(segment_bytes, memory, line) for line in found]
                advance()
            if group is not None:
                group.close()
        own = [[segment_bytes, memory, asdict(line)] for segment_bytes, memory, line in lines]
        for blob in _gather(self._comm, json.dumps(own).encode()):
            for segment_bytes, memory, line in json.loads(blob):
                self._take(phase, segment_bytes, memory, Measurement(**line))

    def _group(self, phase: Phase, segment_bytes: int) -> Communicator | None:
        media = {name: Medium(LINKS[name], segment_bytes) for name in tuning_file.BUILT_IN.media}
        internals = internals_of(self._comm)
        slot_stores = slot_stores_of(internals.joined.tuning)
        text = Tuning(media, "being measured", slot_stores=slot_stores).to_text()
        made = internals.lifecycle.split(phase.colors[self._comm.rank], 0, text)
        return None if made is None else type(self._comm)(*made)

    def _take(self, phase: Phase, segment_bytes: int, memory: str, line: Measurement) -> None:
        if line.wrong:
            raise PycollError(
                f"measuring {line.collective} by {line.algorithm} with {phase.name} gave "
                f"{line.wrong} wrong elements; nothing was stored"
            )
        place = (line.collective, line.algorithm, line.ranks, line.bytes)
        case = Case(*place, segment_bytes, phase.concurrent, memory)
        times = self._times.setdefault(phase.name, {})
        # Concurrent groups must disturb each other; a quartile would favour undisturbed samples.
        seconds = line.median_s if phase.concurrent > 1 else line.quartile_s
        times[case] = max(seconds, times.get(case, 0.0))

    def _fit_network(self, phases: Sequence[Phase]) -> Network:
        alone, *more = phases
        one_host = len(self._comm.hosts) == 1
        transport = DOMAINS if one_host else transport_across(_identities(self._comm))
        found = fit(self._observations(alone.name), LINKS[transport])
        across = found.link
        for phase in more:
            if phase.concurrent:
                across = with_whole_link(across, self._observations(phase.name))
        medium = Medium(across, self._segment(alone.name))
        self._tell(transport, medium, alone.name, found)
        inside = None
        for phase in more:
            if not phase.concurrent:
                found = fit(self._observations(phase.name), LINKS["shm"], spills_from=spills_from())
                inside = Medium(found.link, self._segment(phase.name))
                self._tell("inside", inside, phase.name, found)
        hosts = {name.rpartition(":")[0] for name in self._comm.names}
        made = datetime.date.today().isoformat()
        return Network(tuple(sorted(hosts)), transport, medium, inside, made)

    def _observations(self, phase: str) -> list[Observation]:
        return observations(self._times[phase])

    def _segment(self, phase: str) -> int:
        times = self._times[phase]
        cut = {case: s for case, s in times.items() if case.nbytes >= _CUT_BYTES}
        return best_segment(cut) if cut else SEGMENT_BYTES

    def _tell(self, word: str, medium: Medium, phase: str, found: Fit) -> None:
        for line in (*describe(word, medium), *accuracy(list(self._times[phase]), found)):
            self._say(line)


def with_whole_link(one: Link, together: Sequence[Observation]) -> Link:
    """Combines the link of one rank with the rate of the host's link, measured by all its ranks.

    The times of few long messages do not separate the cost of a segment from that of its bytes. All
    costs except beta and spill therefore keep the values of one rank.
    """
    return fit(together, one, ("beta", "spill")).link._replace(flow=one.beta)


def run_tune_hosts(options: HostsOptions, say: Callable[[str], None]) -> Network:
    """Measures the links of the job that this process is a rank of, and stores the result.

    All ranks of the job call it, and the result is equal on all.

    Before any measurement all ranks raise InvalidArgumentError for a job on one host with one
    domain, and for ranks that share cores. They also raise it if a host could not store the result.
    Raises PycollError if a result was wrong, and InvalidArgumentError if a host failed to store it.
    """
    import pycoll

    comm = pycoll.init()
    try:
        topology = hosts_of(comm)
        links = _measured_ends(topology, ranks_per_core(_identities(comm)))
        leads = topology.local_rank(comm.rank) == 0 if options.path is None else comm.rank == 0
        path = _agree_on(comm, lambda: place_to_store(options.path) if leads else None)
        if comm.rank == 0:
            say(f"measuring links between {links} with {comm.size} ranks")
        network = HostsTuner(comm, options, say).run()
        codecs = _slowest_rates(comm, topology, options.quick)
        if comm.rank == 0:
            for line in describe_codecs(codecs):
                say(line)
        _agree_on(comm, lambda: _store(network, codecs, path))
        if comm.rank == 0:
            where = f"on every host, here in {path}" if options.path is None else f"in {path}"
            say(f"stored {where}, for {network}")
        return network
    finally:
        pycoll.finalize()


def _measured_ends(topology: Topology, oversubscription: float) -> str:
    """The text for the ends of the measured links; raises InvalidArgumentError if there is none."""
    hosts = len(topology.hosts)
    if hosts > 1:
        return f"{hosts} hosts"
    if topology.inner and oversubscription <= 1:
        return f"{topology.domain_count} domains of this host"
    raise InvalidArgumentError(
        "all ranks of this job are on one host: run pycoll tune outside of a job, or with --ranks, "
        "to measure a machine by itself; bind each rank to a core of its own to measure links "
        "between several caches or memory domains"
    )


def _slowest_rates(comm: Communicator, topology: Topology, quick: bool) -> tuple[CodecRate, ...]:
    """The rates of codecs on the slowest host, equal on all ranks; one rank per host measures."""
    own = measured_rates(quick) if topology.local_rank(comm.rank) == 0 else ()
    blobs = _gather(comm, json.dumps(codec_rates.as_json(own)).encode())
    told = [codec_rates.parse_rates(data) for data in map(json.loads, blobs) if data]
    return tuple(
        CodecRate(
            same[0].name, min(one.encode for one in same), min(one.decode_add for one in same)
        )
        for same in zip(*told, strict=True)
    )


def _store(network: Network, codecs: tuple[CodecRate, ...], path: Path | None) -> None:
    if path is None:
        return
    try:
        tuning = present(path).with_network(network)._replace(codecs=codecs)
        tuning_file.store(tuning, path, network.made)
    except OSError as error:
        raise InvalidArgumentError(f"cannot store {str(path)!r}: {error.strerror}") from None


def _agree_on(comm: Communicator, act: Callable[[], _T]) -> _T | None:
    """The result of ``act``; raises InvalidArgumentError on all ranks if one rank raised it."""
    found, refusal = None, ""
    try:
        found = act()
    except InvalidArgumentError as error:
        refusal = f"host {comm.names[comm.rank].rpartition(':')[0]}: {error}"
    refusals = [blob.decode() for blob in _gather(comm, refusal.encode()) if blob]
    if refusals:
        more = f"; and {len(refusals) - 1} more hosts" if len(refusals) > 1 else ""
        raise InvalidArgumentError(refusals[0] + more)
    return found


def _identities(comm: Communicator) -> Sequence[Identity]:
    return internals_of(comm).joined.identities


def _gather(comm: Communicator, blob: bytes) -> list[bytes]:
    """Return bytes of all ranks, in rank order."""
    return internals_of(comm).exchanges.gather_blobs(blob)
