"""Record the operations on every tensor in the trace format of Chrome: negotiation, then running.

Steps with a policy have more rows: one for the backward pass, one for the messages on the wire, and
one for the waits of the program. The row of each tensor also shows how long the tensor was ready
before its message was sent, and the number of that message. ``pycoll.tools.overlaps`` reads these
events.

Each rank writes a separate file, in which each tensor has a row. ``pycoll timeline`` merges the
files of all ranks. Open a file with chrome://tracing or Perfetto.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Sequence
from typing import IO

from pycoll import _core
from pycoll.gradients.step_record import CLOCK, STEP, Step


class Timeline:
    """The record of one rank; it records nothing between ``stop`` and the next ``start``.

    Any thread may call any method. ``is_recording``: whether a record is open; a plain attribute,
    since every operation reads it.
    """

    def __init__(self) -> None:
        self.is_recording = False
        self._lock = threading.Lock()
        self._file: IO[str] | None = None
        self._rows: dict[str, int] = {}
        self._cycles = False
        self._rank = 0
        self._fusions = 0

    def start(self, path: str, rank: int, cycles: bool) -> None:
        """Record to the file ``path``, which is overwritten. ValueError while a record is open."""
        with self._lock:
            if self._file is not None:
                raise ValueError(f"a timeline is recorded to {self._file.name!r}: stop it first")
            self._file = open(path, "w")  # noqa: SIM115  # closed by stop
            self._file.write("[\n")
            self._rows, self._rank, self._cycles = {}, rank, cycles
            _core.record_ends(True)
            clock = {"host": socket.gethostname(), "unix_us": time.time_ns() / 1000}
            self._write({"name": CLOCK, "ph": "M", "tid": 0, "args": clock})
            self.is_recording = True

    def stop(self) -> None:
        """Complete the file. Without an open record it does nothing."""
        with self._lock:
            if self._file is None:
                return
            self.is_recording = False
            _core.record_ends(False)
            self._write({"name": "end", "ph": "i", "s": "g", "tid": 0}, last=True)
            self._file.write("]\n")
            self._file.close()
            self._file = None

    def begin(self, key: str, what: str) -> None:
        """Record the begin of the event ``what`` in the row of a tensor."""
        if self._file is not None:
            with self._lock:
                self._write({"name": what, "ph": "B", "tid": self._row(key)})

    def begin_fused(self, keys: Sequence[str], what: str) -> None:
        """Record the begin of one event for several tensors.

        Each row has the number of the fusion; the row of the first tensor also lists all tensors.
        """
        if self._file is not None:
            with self._lock:
                number, self._fusions = self._fusions, self._fusions + 1
                for place, key in enumerate(keys):
                    args: dict[str, object] = {"fusion": number, "of": len(keys)}
                    if place == 0 and len(keys) > 1:
                        args["tensors"] = list(keys)
                    self._write({"name": what, "ph": "B", "tid": self._row(key), "args": args})

    def end(self, key: str) -> None:
        """Record the end of the event that began last in the row of a tensor."""
        if self._file is not None:
            with self._lock:
                if key in self._rows:
                    self._write({"ph": "E", "tid": self._row(key)})

    def cycle(self) -> None:
        """Record the begin of a round of the negotiation, if cycles are marked."""
        if self._file is not None and self._cycles:
            with self._lock:
                self._write({"name": "CYCLE_START", "ph": "i", "s": "g", "tid": 0})

    def scheduled(self, step: Step) -> None:
        """Record a step with a policy that has ended."""
        with self._lock:
            ready_s = dict(step.ready)
            about = {"step": step.number, "policy": step.policy, "is": "backward"}
            self._span("backward pass", "BACKWARD", step.begin_s, step.flushed_s, about)
            for name, at_s in step.ready:
                row = {"name": "READY", "ph": "i", "s": "t", "tid": self._row(name)}
                args = {"step": step.number, "is": "ready"}
                self._write({**row, "cat": STEP, "ts": at_s * 1e6, "args": args})
            for one in step.travels:
                about = {"step": step.number, "message": one.message, "bytes": one.nbytes}
                title = f"{one.what} of {len(one.names)}"
                wire = {**about, "is": "wire", "tensors": list(one.names)}
                self._span("wire", title, one.starts_s, one.ends_s, wire)
                for name in one.names:
                    first = one.what != "all_gather"
                    if first:
                        self._span(name, "WAIT_FOR_MESSAGE", ready_s[name], one.sent_s, about)
                    self._span(name, one.what.upper(), one.sent_s, one.ends_s, about)
            for begin_s, end_s in step.waits:
                about = {"step": step.number, "is": "wait"}
                self._span("waits", "WAIT", begin_s, end_s, about)

    def _span(
        self, key: str, what: str, begin_s: float, end_s: float, args: dict[str, object]
    ) -> None:
        span = {"name": what, "ph": "X", "cat": STEP, "tid": self._row(key)}
        self._write({**span, "ts": begin_s * 1e6, "dur": (end_s - begin_s) * 1e6, "args": args})

    def _row(self, key: str) -> int:
        row = self._rows.get(key)
        if row is None:
            row = self._rows[key] = len(self._rows) + 1
            self._write({"name": "thread_name", "ph": "M", "tid": row, "args": {"name": key}})
        return row

    def _write(self, event: dict[str, object], last: bool = False) -> None:
        if self._file is not None:
            line = {"pid": self._rank, "ts": time.perf_counter_ns() / 1000, **event}
            self._file.write(json.dumps(line) + ("\n" if last else ",\n"))
