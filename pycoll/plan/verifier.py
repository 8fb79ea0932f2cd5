"""The plan verifier: runs the plans of all ranks and finds every error that any run could show.

Lanes run as in the engines: the outer loop is over tiles, the inner loop over rows. A row waits
until all its segments have arrived and all its send channels have a free slot. Channels hold
`depth` segments. A lane that can run a row remains able to run it, whatever other lanes do. The
effect of a row does not depend on when it runs. The plans therefore form a Kahn network: every
interleaving of the lanes gives the same segments and, if it blocks, blocks at the same rows. One
run decides about deadlock and about values. A larger depth than the proved one is safe too.

Engines may run the leading rows of a lane tiles ahead of the other rows. The verifier never does,
because the latest possible send is the case most likely to deadlock. In its causal order, however,
a leading row does not come after the later rows of earlier tiles.

Time is causal (one vector clock per process). A row comes after the earlier rows of its lane and
after the rows that sent its received segments. A slot that becomes free orders nothing here, since
engines may have more slots. Two conflicting accesses to one segment of memory without such an order
are a race.

A row may also wait until its receivers have announced their write windows, or that they open none.
They do so when they begin the operation, which depends on no row of it. So such a wait cannot close
a cycle of waits. It orders nothing either, because media without write windows do not wait. The
verifier proves that every announcement that a row waits for is made.

A rank whose rows have all run waits until the medium has sent the memory that was handed over. It
also waits until receivers have released the segments that they read in place (`Ports::pass_on_rest`
in csrc/executor/ports.cpp). A receiver releases a segment when the row that receives it has run.
The proof shows that all rows of all ranks run and that they receive every segment, so this wait
ends. No row of the operation comes after it, so it adds no edge to the proof. Later operations come
after it, since a channel serves one operation at a time. All ranks begin operations in the same
order, and no operation waits for a later one. So waits of several operations close no cycle either.

Values record their tile, so a value that an earlier tile left in scratch is detected.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NoReturn

from pycoll.plan.lowering import DIVIDING, IN_PLACE
from pycoll.plan.plan_format import (
    ANNOUNCE_WINDOW,
    AWAIT_WINDOW,
    CODED_SOURCE,
    CODED_TARGET,
    DEPTH,
    DIRECT_WRITE,
    ENCODE,
    FINAL,
    FLUSH,
    NO_CARRY,
    TOKEN_ROW,
    ZERO_COPY,
    Buffer,
    Plan,
    Row,
    exposed_place,
    leading_count,
    place_text,
    unpack,
)
from pycoll.plan.verifier_state import Epoch, MemoryAccesses, Process, ProvedValue, Queue, Segment
from pycoll.schedule.collectives import CODED, SHARING, Collective
from pycoll.schedule.contributions import (
    Trees,
    Value,
    check_same_bits,
    combine,
    encode_value,
    initial,
    outputs_of,
    ranks_text,
)
from pycoll.schedule.copies import CopyStrategy
from pycoll.schedule.language import Schedule, ScheduleError


def verify_plans(
    plans: Sequence[bytes],
    depth: int = DEPTH,
    tiles: int = 3,
    tiles_of: Callable[[int], int] | None = None,
    everyone_heard: bool = False,
    coded: Sequence[int] | None = None,
) -> None:
    """Proves the plans of all ranks, given in order of rank; raises ScheduleError with details.

    The proof shows:

    * No deadlock occurs with channels of `depth` segments, and no segment is left over.
    * Every output is right in every tile.
    * No race occurs, also in place if the collective can run in place.
    * Memory that was handed over is not written before it is drained. Memory that is exposed for
      zero-copy reads is not written before it is read.
    * A direct write by a sender comes after all earlier accesses of its receiver to that memory.
    * A row waits for write windows exactly if its rank receives no data and is to write into them,
      and every receiver announces one.
    * The final flag is on exactly the rows that complete a value.
    * Codes are received and read as codes. Every value is encoded at most twice on its way, and a
      rank encodes a chunk at most once. If codes travel, a value that several ranks end with is
      encoded once, where it is complete. All of them end with the decoded value. A value that one
      rank ends with is not encoded there.

    A flush waits for the medium only, never for another row, so it cannot cause a deadlock.

    ``tiles_of`` gives each data chunk its own number of tiles (1..tiles), as uneven sizes do. If
    ``everyone_heard`` is set, every worker must end causally after the start of every rank, and a
    server after the start of every worker. ``coded``: one label per rank; exactly the data between
    ranks of different labels must be codes. None: any data may be.
    """
    verifier = PlanVerifier([unpack(image) for image in plans], depth, tiles, tiles_of)
    verifier.labels = coded
    verifier.run(everyone_heard)


class PlanVerifier:
    """Executes the plans of all ranks symbolically; `verify_plans` is its interface."""

    def __init__(
        self, plans: list[Plan], depth: int, tiles: int, tiles_of: Callable[[int], int] | None
    ) -> None:
        self.plans = plans
        self.depth = depth
        self.tiles = tiles
        self.tiles_of = tiles_of if tiles_of is not None else lambda chunk: tiles
        first = plans[0]
        self.kind, self.size, self.parts, self.root = (
            first.collective,
            first.size,
            first.parts,
            first.root,
        )
        #: The operation without transfers, for the inputs, outputs and servers of each rank.
        self.operation = Schedule(
            self.kind, self.size, self.parts, (), self.root, servers=first.servers
        )
        for rank, plan in enumerate(plans):
            same = (plan.collective, plan.size, plan.parts, plan.root, plan.servers)
            one = (self.kind, self.size, self.parts, self.root, first.servers)
            if same != one or plan.rank != rank:
                raise ScheduleError(f"plan {rank} is {same} of rank {plan.rank}: not one operation")
        if len(plans) != self.size:
            raise ScheduleError(f"{len(plans)} plans were given for size {self.size}")
        ranks = range(self.size)
        self.workers = self.operation.workers
        self.in_place, self.everyone = self.kind in IN_PLACE, (1 << self.workers) - 1
        self.inputs = [self.operation.inputs_of(rank) for rank in ranks]
        self.outputs = [self.operation.outputs_of(rank) for rank in ranks]
        self.accesses: dict[tuple[int, int, int, int], MemoryAccesses] = {}
        self.queues: dict[tuple[int, int, int], Queue] = {}
        self.processes: list[Process] = []
        self.trees: Trees = {}
        #: Whether any row has codes; the labels of `verify_plans`; (rank, chunk, tile) of the
        #: values that have been encoded.
        self.coded = any(row.is_coded for plan in plans for row in plan.rows)
        self.labels: Sequence[int] | None = None
        self.encoded: set[tuple[int, int, int]] = set()
        if self.coded and self.kind not in CODED:
            raise ScheduleError(f"{self.kind.name.lower()} takes no codec")
        self._connect()
        for plan in plans:
            self._check_waits(plan)

    def _connect(self) -> None:
        for plan in self.plans:
            for lane in range(plan.lane_count):
                rows = [row for row in plan.rows if row.lane == lane]
                leading = leading_count(rows)
                if leading:
                    self._add(plan, lane, rows[:leading], driver=len(self.processes) + 1)
                self._add(plan, lane, rows[leading:], driver=len(self.processes), leading=leading)
        for process in self.processes:
            process.clock = [0] * len(self.processes)

    def _check_waits(self, plan: Plan) -> None:
        """Checks which rows of the plan wait for write windows; `_execute` checks the receivers."""
        idle = not any(row.recv and row.chunk != TOKEN_ROW for row in plan.rows)
        for number, row in enumerate(plan.rows):
            awaits = idle and row.copies is not CopyStrategy.RECEIVER
            if bool(row.flags & AWAIT_WINDOW) != awaits:
                must = "must" if awaits else "must not"
                raise ScheduleError(
                    f"rank {plan.rank}, row {number}: {must} wait for write windows, since its "
                    f"rank {'only sends' if idle else 'receives data'} and the copies are made by "
                    f"{row.copies.name}"
                )

    def _add(self, plan: Plan, lane: int, rows: list[Row], driver: int, leading: int = 0) -> None:
        recv = [[self._queue(plan, end, driver) for end in row.recv] for row in rows]
        send = [[self._queue(plan, end, driver) for end in row.send] for row in rows]
        self.processes.append(Process(plan.rank, lane, rows, recv, send, [], leading > 0, leading))

    def _queue(self, plan: Plan, end: int, process: int) -> Queue:
        peer, number, sends = plan.channels[end]
        key = (plan.rank, peer, number) if sends else (peer, plan.rank, number)
        queue = self.queues.setdefault(key, Queue(-1, -1))
        if sends:
            queue.sender = process
        else:
            queue.receiver = process
        return queue

    def run(self, everyone_heard: bool) -> None:
        """Runs all rows and checks the result; raises ScheduleError with details."""
        leading = {index - 1 for index, process in enumerate(self.processes) if process.has_leading}
        ready = deque(index for index in range(len(self.processes)) if index not in leading)
        while ready:
            self._advance(ready.popleft(), self.tiles, ready)
        self._check_end()
        self._check_outputs()
        if everyone_heard or self.kind is Collective.BARRIER:
            self._check_heard()

    def _advance(self, index: int, tiles: int, ready: deque[int]) -> None:
        process = self.processes[index]
        while process.tile < tiles and process.rows:
            at = process.next
            if at == 0 and process.has_leading and not self._run_leading(index, ready):
                return
            row = process.rows[at]
            if self._takes_part(row, process.tile):
                recv, send = process.recv[at], process.send[at]
                for queue in recv:
                    if not queue.segments:
                        return
                for queue in send:
                    if len(queue.segments) >= self.depth:
                        return
                self._execute(index, process, row, recv, send)
                ready.extend(queue.sender for queue in recv)
                ready.extend(queue.receiver for queue in send if queue.receiver >= 0)
            process.next += 1
            if process.next == len(process.rows):
                process.next = 0
                process.tile += 1

    def _run_leading(self, index: int, ready: deque[int]) -> bool:
        """Runs the leading rows for the current tile; the process's next row comes after them.

        The result is False if the leading rows are blocked.
        """
        process, leading = self.processes[index], self.processes[index - 1]
        self._advance(index - 1, process.tile + 1, ready)
        process.clock[index - 1] = leading.clock[index - 1]
        return leading.tile > process.tile

    def _takes_part(self, row: Row, tile: int) -> bool:
        if row.chunk == TOKEN_ROW:
            return tile == self.tiles - 1
        return tile < self.tiles_of(row.chunk)

    def _execute(
        self, index: int, process: Process, row: Row, recv: list[Queue], send: list[Queue]
    ) -> None:
        clock = process.clock
        arrived = [queue.segments.popleft() for queue in recv]
        for segment in arrived:
            if segment.chunk != row.chunk:
                self._refuse(process, f"receives a segment of chunk {segment.chunk}")
            if segment.waits and not row.flags & ANNOUNCE_WINDOW:
                self._refuse(process, "announces no write window, but its sender waits for that")
            clock[:] = map(max, clock, segment.clock)
        clock[index] += 1
        now = (index, clock[index])
        for segment in arrived:
            segment.consumed = now
        self._check_codes(process, row, arrived)
        held = None if row.chunk == TOKEN_ROW else self._result(process, row, arrived, now)
        if row.flags & DIRECT_WRITE:
            self._check_direct_write(process, row, arrived[0].clock)
        if row.target:
            self._write(process, row, held, now)
        where = exposed_place(row) if row.flags & ZERO_COPY or not row.recv else None
        if row.is_coded:
            where = None  # the segments that it sends lie in slot buffers
        known = clock.copy()
        for i, queue in enumerate(send):
            segment = Segment(
                row.chunk,
                held,
                known,
                bool(row.flags & ZERO_COPY),
                bool(row.flags & AWAIT_WINDOW),
                coded=bool(row.coded_send >> i & 1),
            )
            queue.segments.append(segment)
            if where is not None:
                self._accesses(process, *where).sends.append((now, segment))

    def _result(
        self, process: Process, row: Row, arrived: list[Segment], now: Epoch
    ) -> ProvedValue:
        operands = [segment.held for segment in arrived]
        if row.source:
            coded = bool(row.coded_local & CODED_SOURCE)
            own = self._read(process, row.source, row.source_slot, now, coded)
            operands.insert(row.source_position, own)
        if row.carry != NO_CARRY:
            operands.insert(0, self._read(process, Buffer.SCRATCH, row.carry, now))
        present = [held for held in operands if held is not None]
        for held in present:
            if held.value.chunk != row.chunk or held.tile != process.tile:
                self._refuse(process, f"takes {held.value} of tile {held.tile}")
        value, final, sealed = present[0].value, present[0].final, present[0].sealed
        roundings = max(held.roundings for held in present)
        for held in present[1:]:
            try:
                value = combine(value, held.value, self.trees)
            except ScheduleError as error:
                self._refuse(process, str(error))
        if len(present) > 1 and any(held.final for held in present):
            self._refuse(process, "combines a value that is already final")
        complete = len(present) > 1 and self.kind in DIVIDING and value.ranks == self.everyone
        if bool(row.flags & FINAL) != complete:
            state = "is final but" if row.flags & FINAL else "is not final though it"
            self._refuse(process, f"{state} makes {value} from {len(present)} operands")
        if row.coded_local & ENCODE:
            value, roundings, sealed = self._encode(process, row, value), roundings + 1, True
            if roundings > 2:
                self._refuse(process, f"encodes {value} for the third time")
        else:
            sealed &= len(present) == 1
        return ProvedValue(value, process.tile, final or complete, roundings, sealed)

    def _check_codes(self, process: Process, row: Row, arrived: list[Segment]) -> None:
        """Checks that codes are received as codes, and sent exactly where the labels differ."""
        plan = self.plans[process.rank]
        for i, segment in enumerate(arrived):
            is_coded = bool(row.coded_recv >> i & 1)
            if segment.coded != is_coded:
                what = ("values", "codes")
                self._refuse(
                    process,
                    f"receives {what[segment.coded]} as {what[is_coded]} from rank "
                    f"{plan.channels[row.recv[i]].peer}",
                )
        if self.labels is None or row.chunk == TOKEN_ROW:
            return
        for i, end in enumerate(row.send):
            peer = plan.channels[end].peer
            must = self.labels[process.rank] != self.labels[peer]
            if bool(row.coded_send >> i & 1) != must:
                self._refuse(process, f"must{'' if must else ' not'} send codes to rank {peer}")

    def _encode(self, process: Process, row: Row, value: Value) -> Value:
        """The value that the codes decode to. A rank has one residual for each chunk."""
        key = (process.rank, row.chunk, process.tile)
        if key in self.encoded:
            self._refuse(process, f"encodes chunk {row.chunk} again")
        if row.chunk // self.parts not in self.inputs[process.rank]:
            self._refuse(process, f"encodes chunk {row.chunk}, which its input lacks")
        self.encoded.add(key)
        return encode_value(value, process.rank, self.trees)

    def _accesses(self, process: Process, buffer: int, slot: int) -> MemoryAccesses:
        """The accesses to a buffer and slot; in place, input and output of a chunk share memory."""
        tile = 0 if buffer == Buffer.SCRATCH else process.tile
        if buffer == Buffer.INPUT and self._shares_memory(process.rank, slot):
            buffer = Buffer.OUTPUT
        key = (process.rank, buffer, slot, tile)
        accesses = self.accesses.get(key)
        if accesses is None:
            accesses = self.accesses[key] = MemoryAccesses()
        return accesses

    def _shares_memory(self, rank: int, chunk: int) -> bool:
        block = chunk // self.parts
        return self.in_place and block in self.inputs[rank] and block in self.outputs[rank]

    def _read(
        self, process: Process, buffer: int, slot: int, now: Epoch, coded: bool = False
    ) -> ProvedValue:
        accesses = self._accesses(process, buffer, slot)
        accesses.reads[now[0]] = now[1]
        wrote = [accesses.written, accesses.copied if buffer == Buffer.OUTPUT else None]
        for writer in wrote:
            if writer is not None and not self._after(process, writer):
                where = place_text(buffer, slot)
                self._refuse(process, f"reads {where} while {self._lane_name(writer)} writes it")
        if buffer == Buffer.INPUT:
            if slot // self.parts not in self.inputs[process.rank]:
                self._refuse(process, f"reads input chunk {slot}, which its input lacks")
            if accesses.written is not None:
                self._refuse(
                    process,
                    f"reads input chunk {slot}, which in place "
                    f"{self._lane_name(accesses.written)} has overwritten",
                )
            return ProvedValue(initial(slot, process.rank), process.tile, False)
        if accesses.held is None:
            self._refuse(process, f"reads {place_text(buffer, slot)}, which nothing has written")
        if accesses.held.coded != coded:
            self._refuse(process, f"confuses values and codes: {place_text(buffer, slot)}")
        return accesses.held

    def _write(self, process: Process, row: Row, held: ProvedValue | None, now: Epoch) -> None:
        accesses = self._accesses(process, row.target, row.target_slot)
        slot, to_output = row.target_slot, row.target == Buffer.OUTPUT
        if to_output and slot // self.parts not in self.outputs[process.rank]:
            self._refuse(process, f"writes output chunk {slot}, which its output lacks")
        if to_output and slot != row.chunk:
            self._refuse(process, f"writes output chunk {slot}, which may differ in size")
        if held is not None:
            held = held._replace(coded=bool(row.coded_local & CODED_TARGET))
        accesses.held = held
        stays = row.source == Buffer.INPUT and row.source_slot == slot and not row.recv
        stays = stays and not row.coded_local & ENCODE
        if to_output and stays and self._shares_memory(process.rank, slot):
            accesses.copied = now
            return  # a later writer must follow this row's read, so only later reads need a check
        self._check_write(process, row, accesses)
        accesses.written = now
        accesses.reads.clear()
        accesses.sends.clear()

    def _check_write(self, process: Process, row: Row, accesses: MemoryAccesses) -> None:
        if accesses.written is not None and not self._after(process, accesses.written):
            self._refuse_write(process, row, f"{self._lane_name(accesses.written)} writes it too")
        for reader in accesses.reads.items():
            if not self._after(process, reader):
                self._refuse_write(process, row, f"{self._lane_name(reader)} reads it")
        for begun, segment in accesses.sends:
            ended = segment.consumed is not None and self._after(process, segment.consumed)
            drained = row.flags & FLUSH and not segment.exposed and self._after(process, begun)
            if not ended and not drained:
                self._refuse_write(process, row, f"it is being sent by {self._lane_name(begun)}")

    def _check_direct_write(self, process: Process, row: Row, sent: list[int]) -> None:
        """Checks that the sender may write to the target as soon as its own row runs.

        ``sent`` is the clock of the sender. It must show that all earlier reads and writes of the
        place, and all reads of memory exposed or handed over there, are done. Later accesses follow
        this row, as they follow any row that writes.
        """
        accesses = self._accesses(process, row.target, row.target_slot)
        others = list(accesses.reads.items())
        if accesses.written is not None:
            others.append(accesses.written)
        what = f"lets its sender write {place_text(row.target, row.target_slot)}"
        for other in others:
            if sent[other[0]] < other[1]:
                self._refuse(
                    process, f"{what}, although {self._lane_name(other)} may not have used it yet"
                )
        for begun, segment in accesses.sends:
            reader = segment.consumed
            if reader is None or sent[reader[0]] < reader[1]:
                self._refuse(
                    process,
                    f"{what}, although the segment that {self._lane_name(begun)} sends from it "
                    "may not be read yet",
                )

    def _refuse_write(self, process: Process, row: Row, why: str) -> NoReturn:
        self._refuse(process, f"writes {place_text(row.target, row.target_slot)} while {why}")

    def _after(self, process: Process, epoch: Epoch) -> bool:
        return process.clock[epoch[0]] >= epoch[1]

    def _lane_name(self, epoch: Epoch) -> str:
        process = self.processes[epoch[0]]
        return f"rank {process.rank} lane {process.lane}"

    def _refuse(self, process: Process, why: str) -> NoReturn:
        row = process.rows[process.next]
        chunk = "token" if row.chunk == TOKEN_ROW else f"chunk {row.chunk}"
        number = process.first + process.next
        raise ScheduleError(
            f"rank {process.rank}, lane {process.lane}, row {number} ({chunk}), "
            f"tile {process.tile}: {why}"
        )

    def _check_end(self) -> None:
        stuck = [self._wait_text(p) for p in self.processes if p.rows and p.tile < self.tiles]
        if stuck:
            more = f" and {len(stuck) - 4} more" if len(stuck) > 4 else ""
            raise ScheduleError("deadlock: " + "; ".join(stuck[:4]) + more)
        for (source, destination, number), queue in self.queues.items():
            if queue.segments:
                raise ScheduleError(
                    f"{len(queue.segments)} segments from rank {source} to rank {destination} on "
                    f"channel {number} are never received"
                )

    def _wait_text(self, process: Process) -> str:
        plan = self.plans[process.rank]
        row = process.rows[process.next]
        waits = []
        for end, queue in zip(row.recv, process.recv[process.next], strict=True):
            if not queue.segments:
                waits.append(f"a segment from rank {plan.channels[end].peer}")
        for end, queue in zip(row.send, process.send[process.next], strict=True):
            if len(queue.segments) >= self.depth:
                waits.append(f"a free slot towards rank {plan.channels[end].peer}")
        return (
            f"rank {process.rank} lane {process.lane} row {process.first + process.next} "
            f"tile {process.tile} waits for {', '.join(waits) or 'the leading rows'}"
        )

    def _check_outputs(self) -> None:
        operation = self.operation
        for tile in range(self.tiles):
            values = []
            for rank in range(self.size):
                for chunk, ranks in outputs_of(operation, rank):
                    if tile < self.tiles_of(chunk):
                        values.append((rank, self._output(rank, chunk, tile, ranks)))
            check_same_bits(operation, values, self.coded and self.kind in SHARING)

    def _output(self, rank: int, chunk: int, tile: int, ranks: int) -> Value:
        accesses = self.accesses.get((rank, Buffer.OUTPUT, chunk, tile))
        held = accesses.held if accesses is not None else None
        if held is None:
            raise ScheduleError(f"rank {rank} never writes output chunk {chunk}, tile {tile}")
        if (held.value.chunk, held.value.ranks) != (chunk, ranks):
            raise ScheduleError(
                f"rank {rank} ends with {held.value} in output chunk {chunk}, "
                f"tile {tile}; it must hold {ranks_text(ranks)}"
            )
        if held.final != (self.kind in DIVIDING and self.workers > 1):
            raise ScheduleError(f"output chunk {chunk} of rank {rank} is never final")
        if self.coded and held.sealed != (self.kind in SHARING):
            what = "is what codes decode to" if held.sealed else "is not what codes decode to"
            raise ScheduleError(f"output chunk {chunk} of rank {rank} {what}")
        return held.value

    def _check_heard(self) -> None:
        heard = [0] * self.size
        for process in self.processes:
            for other, time in zip(self.processes, process.clock, strict=True):
                if time:
                    heard[process.rank] |= 1 << other.rank
        for rank, ranks in enumerate(heard):
            # A rank that serves gets no result, so it need not hear of other servers.
            needed = self.size if rank < self.workers else self.workers
            missing = ((1 << needed) - 1) & ~(ranks | 1 << rank)
            if missing:
                raise ScheduleError(f"rank {rank} leaves without hearing of {ranks_text(missing)}")
