"""A snapshot of a shard as a sequence of messages, by which a server fills another one.

The first pieces hold one JSON text of clocks, numbers, texts and the list of parts. For each part
of that list follow the pieces of its value, and then its pushes of open rounds. The last piece has
the flag END.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from pycoll.ps.messages import TEXT_BYTES_MAX, Kind, Message
from pycoll.ps.shard import Part, Shard
from pycoll.untrusted import json_object, read_json

#: Flags of a PIECE. META: a piece of the text. END: the last piece. KEPT: a piece of the shard at
#: the newest cut.
META, END, KEPT = 1, 2, 4

#: The members of the text, and of each of its parts.
FACTS = {
    "live": list,
    "clocks": dict,
    "applied": dict,
    "late": dict,
    "texts": dict,
    "names": dict,
    "optimizer": str,
    "version": int,
    "lost": int,
    "cuts": dict,
    "cut": int,
    "writer": int,
    "epoch": int,
    "refused": list,
    "parts": list,
}
PART_FACTS = {
    "key": int,
    "part": int,
    "rule": int,
    "version": int,
    "clocks": dict,
    "values": int,
    "pending": list,
}


def pieces_of(shard: Shard, lsn: int) -> Iterator[Message]:
    """Yield the messages of a snapshot of the shard after update ``lsn``."""
    parts, payloads = [], []
    for (key, number), part in sorted(shard.parts.items()):
        values = list(shard.arithmetic.pieces(part.value))
        payloads += values
        open_pushes = [
            (round_number, worker, one)
            for round_number, by in sorted(part.pending.items())
            for worker, one in sorted(by.items())
        ]
        for _, _, pushes in open_pushes:
            payloads += pushes
        parts.append(
            {
                "key": key,
                "part": number,
                "rule": part.rule,
                "version": part.version,
                "clocks": part.clocks,
                "values": len(values),
                "pending": [
                    [round_number, worker, len(pushes)]
                    for round_number, worker, pushes in open_pushes
                ],
            }
        )
    facts = {
        "live": shard.live,
        "clocks": shard.clocks,
        "applied": shard.applied,
        "late": shard.late,
        "texts": shard.texts,
        "names": shard.names,
        "optimizer": shard.optimizer.hex(),
        "version": shard.version,
        "lost": -1 if shard.lost is None else shard.lost,
        "cuts": shard.cuts,
        "cut": shard.cut,
        "writer": shard.writer,
        "epoch": shard.epoch,
        "refused": shard.refused_cut,
        "parts": parts,
    }
    text = json.dumps(facts).encode()
    for start in range(0, len(text), TEXT_BYTES_MAX):
        yield Message(Kind.PIECE, flags=META, payload=text[start : start + TEXT_BYTES_MAX])
    for payload in payloads:
        yield Message(Kind.PIECE, payload=payload)
    yield Message(Kind.PIECE, flags=END, lsn=lsn)


class SnapshotReader:
    """Collects the pieces, and fills the shard when the last one has come.

    ``cut_pieces``: the pieces of the shard at the newest cut.
    """

    def __init__(self, shard: Shard) -> None:
        self._shard = shard
        self._text: list[bytes] = []
        self._payloads: list[Any] = []
        self.cut_pieces: list[Message] = []

    def take(self, piece: Message) -> bool:
        """Take the next piece; return True if it was the last one, so that the shard is filled.

        Raises ValueError for pieces that ``pieces_of`` did not make.
        """
        if piece.flags & KEPT:
            self.cut_pieces.append(piece._replace(flags=piece.flags & ~KEPT))
        elif piece.flags == META:
            self._text.append(bytes(piece.payload))
        elif piece.flags == END:
            self._fill()
            return True
        else:
            self._payloads.append(piece.payload)
        return False

    def _fill(self) -> None:
        shard = self._shard
        facts = json_object(read_json(b"".join(self._text)), FACTS)
        payloads = iter(self._payloads)
        shard.parts.clear()
        for one in facts["parts"]:
            part_facts = json_object(one, PART_FACTS)
            values = [next(payloads) for _ in range(part_facts["values"])]
            part = Part(
                part_facts["rule"],
                shard.arithmetic.join(part_facts["rule"], values),
                part_facts["version"],
            )
            part.clocks = _numbers(part_facts["clocks"])
            for round_number, worker, count in part_facts["pending"]:
                pushes = [next(payloads) for _ in range(count)]
                part.pending.setdefault(round_number, {})[worker] = pushes
            shard.parts[part_facts["key"], part_facts["part"]] = part
        shard.live = list(facts["live"])
        shard.clocks = _numbers(facts["clocks"])
        shard.applied = _numbers(facts["applied"])
        shard.late = {int(worker): list(late) for worker, late in facts["late"].items()}
        shard.texts = dict(facts["texts"])
        shard.names = {int(number): str(name) for number, name in facts["names"].items()}
        shard.optimizer = bytes.fromhex(facts["optimizer"])
        shard.version = facts["version"]
        shard.lost = None if facts["lost"] < 0 else facts["lost"]
        shard.cuts = _numbers(facts["cuts"])
        shard.cut = facts["cut"]
        shard.writer = facts["writer"]
        shard.epoch = facts["epoch"]
        number, reason = facts["refused"]
        shard.refused_cut = (int(number), str(reason))


def _numbers(table: dict[str, int]) -> dict[int, int]:
    return {int(name): int(value) for name, value in table.items()}
