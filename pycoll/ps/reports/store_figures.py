"""Figures of stores as text, for ``Store.explain`` and ``pycoll ps``."""

from __future__ import annotations

from collections import Counter
from typing import Any

from pycoll.ps.values.store_values import TABLES

#: The most keys, and the most rows of a table, that a list of busy ones names.
_BUSY_MAX = 5
#: The most characters of a name that are shown.
_NAME_MAX = 64


def store_text(facts: dict[str, Any], workers: int) -> str:
    """Return the text of ``Store.stats``. ``workers``: how many the store has had."""
    shards = facts["shards"]
    lines = [
        f"store: {facts['consistency']}, {_count_text(workers, 'worker')}, "
        f"{_count_text(len(shards), 'shard')}"
    ]
    lines += [_shard_line(one) for one in shards]
    held: Counter[int] = Counter()
    count: Counter[int] = Counter()
    uses: Counter[str] = Counter()
    for shard in shards:
        for rank in shard["chain"]:
            held[rank] += shard["bytes"]
            count[rank] += 1
        for one in shard["busy"]:
            uses[display_name(one)] += one["uses"]
    lines += [
        f"server rank {rank}: {held[rank]} bytes in {_count_text(count[rank], 'shard')}"
        for rank in sorted(held)
    ]
    busy = [f"{name}: {number}" for name, number in uses.most_common(_BUSY_MAX) if number]
    if busy:
        lines.append(f"busiest, by pushes and pulls of parts: {'; '.join(busy)}")
    for name, hot in facts["tables"].items():
        if hot:
            rows = "; ".join(f"{row}: {number}" for row, number in hot[:_BUSY_MAX])
            lines.append(f"table {name!r}: busiest rows of this worker, by uses: {rows}")
    lines += [_cache_line(name, one) for name, one in facts["caches"].items()]
    return "\n".join(lines)


def _cache_line(name: str, one: dict[str, int]) -> str:
    line = (
        f"table {name!r}: {one['kept']} of at most {one['most']} rows are kept here, and "
        f"answered {one['hits']} of {one['hits'] + one['misses']} pulled rows"
    )
    if "fetched" not in one:
        return line
    return (
        f"{line}; hot rows are kept: servers sent {one['fetched']} rows, and for "
        f"{one['repeated']} of these an earlier answer was new enough"
    )


def _shard_line(one: dict[str, Any]) -> str:
    chain = " -> ".join(f"rank {rank}" for rank in one["chain"])
    clocks = ", ".join(f"{rank}: {clock}" for rank, clock in one["clocks"].items())
    gone = f"; gone: {one['gone']}" if one["gone"] else ""
    return (
        f"shard {one['shard']}: {chain}; {_count_text(one['parts'], 'part')}; "
        f"{one['pushes']} pushes, {one['dropped']} dropped; "
        f"clocks {clocks}{gone}; {waiting_text(one['waiting'])}"
    )


def waiting_text(waiting: dict[str, int]) -> str:
    """Return how many requests of a shard wait, and how many clocks they lack."""
    lacking = {lacks: count for lacks, count in waiting.items() if lacks != "0"}
    if not lacking:
        return f"{sum(waiting.values())} wait"
    by = ", ".join(
        f"{count} for {_count_text(int(one), 'clock')}" for one, count in lacking.items()
    )
    return f"{sum(waiting.values())} wait, of them {by}"


def display_name(part: dict[str, Any]) -> str:
    """Return the name of the key or table of an entry of "busy"."""
    name = part["name"]
    if not name:
        # A worker has loaded the part, and has not named it yet.
        return f"key number {part['key']}"
    is_table, name = name.startswith(TABLES), name.removeprefix(TABLES)
    cut = name if len(name) <= _NAME_MAX else f"{name[:_NAME_MAX]}..."
    return f"table {cut!r}" if is_table else repr(cut)


def _count_text(count: int, word: str) -> str:
    return f"{count} {word}" if count == 1 else f"{count} {word}s"
