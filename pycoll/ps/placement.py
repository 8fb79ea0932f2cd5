"""The placement of keys: how arrays are cut into parts and spread over shards."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple

from pycoll.ps.array_memory import Terms
from pycoll.ps.messages import PART_BYTES_MAX
from pycoll.types import ITEM_BYTES
from pycoll.untrusted import json_object, read_json

#: The lower bits of a key's number, which count the keys of one epoch.
_KEYS_BITS = 16
_FACTS = {"number": int, "dtype": int, "shape": list, "update": str, "shards": list}


class KeyPlacement(NamedTuple):
    """The placement of a key. ``number``: the key's; ``shards``: by part its shard."""

    number: int
    terms: Terms
    update: str
    shards: tuple[int, ...]

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """The bytes of each part, as (begin, end)."""
        return ranges_of(self.terms)

    def to_text(self) -> str:
        """Return the form that ``from_text`` reads."""
        facts = {
            "number": self.number,
            "dtype": self.terms.dtype,
            "shape": self.terms.shape,
            "update": self.update,
            "shards": self.shards,
        }
        return json.dumps(facts)

    @classmethod
    def from_text(cls, text: str | bytes, shards: int) -> KeyPlacement:
        """Read a placement in a store of so many shards. Raises ValueError for any other text."""
        facts = json_object(read_json(text), _FACTS)
        shape, places = facts["shape"], facts["shards"]
        if not all(type(one) is int and one >= 0 for one in shape):
            raise ValueError("a shape that is none")
        if not 0 <= facts["dtype"] < len(ITEM_BYTES) or facts["number"] < 0:
            raise ValueError("an unknown element type, or a negative number")
        made = cls(facts["number"], Terms(facts["dtype"], tuple(shape)), facts["update"], ())
        if len(places) != len(made.ranges):
            raise ValueError(f"{len(places)} shards for {len(made.ranges)} parts")
        if not all(type(one) is int and 0 <= one < shards for one in places):
            raise ValueError("a shard that there is not")
        return made._replace(shards=tuple(places))


def ranges_of(terms: Terms) -> list[tuple[int, int]]:
    """Return the bytes of each part as (begin, end); an empty array has one empty part."""
    item = ITEM_BYTES[terms.dtype]
    nbytes = item
    for axis in terms.shape:
        nbytes *= axis
    step = PART_BYTES_MAX // item * item
    return [(begin, min(begin + step, nbytes)) for begin in range(0, max(nbytes, 1), step)]


class PartPlacer:
    """Assigns each part to the server with the fewest bytes, and to its shard with the fewest.

    So the load of a server is at most the mean and one part, as long as shards do not move.
    """

    def __init__(self, shards: int) -> None:
        self.loads = [0] * shards
        self._keys = 0

    def place(self, terms: Terms, update: str, epoch: int, heads: Sequence[int]) -> KeyPlacement:
        """Return the placement of a new key.

        ``epoch``: the one in which this worker is the first one. ``heads``: by shard its first
        server.
        """
        shards_of_parts = []
        by_server = dict.fromkeys(heads, 0)
        for server, load in zip(heads, self.loads, strict=True):
            by_server[server] += load
        for begin, end in ranges_of(terms):
            server = min(by_server, key=by_server.__getitem__)
            shards = [shard for shard, head in enumerate(heads) if head == server]
            shard = min(shards, key=self.loads.__getitem__)
            self.loads[shard] += end - begin
            by_server[server] += end - begin
            shards_of_parts.append(shard)
        return KeyPlacement(self.number(epoch), terms, update, tuple(shards_of_parts))

    def note(self, placement: KeyPlacement) -> None:
        """Count the bytes of a key that another worker has placed."""
        for shard, (begin, end) in zip(placement.shards, placement.ranges, strict=True):
            self.loads[shard] += end - begin

    def number(self, epoch: int) -> int:
        """Return the number of a new key.

        An epoch has one first worker, so no two keys of a store have the same number.
        """
        self._keys += 1
        return epoch << _KEYS_BITS | self._keys - 1
