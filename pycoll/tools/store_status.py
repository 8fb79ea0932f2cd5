"""The text of ``pycoll ps``: the stores whose servers run on this host."""

from __future__ import annotations

import time
from typing import Any

from pycoll.ps.status import running_servers

#: The most parts that the list of busy parts names.
_BUSY_MAX = 5


def status_text(seconds: float) -> str:
    """Return the status of all stores. ``seconds``: the time over which rates are measured."""
    before = running_servers()
    if not before:
        return "no server of a store of yours runs on this host"
    time.sleep(seconds)
    old = {(one["store"], one["rank"]): one for one in before}
    lines: list[str] = []
    store = None
    for one in running_servers():
        if one["store"] != store:
            store = one["store"]
            lines.append(f"store {store}, view {one['view']}, view manager rank {one['manager']}")
        lines.append(f"  server rank {one['rank']} (pid {one['pid']})")
        earlier = old.get((one["store"], one["rank"]), {"shards": []})
        counts = {shard["shard"]: shard["pushes"] for shard in earlier["shards"]}
        for shard in one["shards"]:
            lines += _shard_lines(shard, counts.get(shard["shard"], 0), seconds)
    return "\n".join(lines)


def _shard_lines(shard: dict[str, Any], pushes: int, seconds: float) -> list[str]:
    chain = " -> ".join(map(str, shard["chain"]))
    clocks = ", ".join(f"{rank}: {clock}" for rank, clock in shard["clocks"].items())
    rate = max(0, shard["pushes"] - pushes) / seconds
    gone = f"; gone {shard['gone']}" if shard["gone"] else ""
    lines = [
        f"    shard {shard['shard']}: chain {chain}; {shard['bytes']} bytes in parts: "
        f"{shard['parts']}; {rate:.0f} pushes/s; waiting: {shard['waiting']}; clocks {clocks}{gone}"
    ]
    busy = [f"key {key} part {part}: {uses}" for key, part, uses in shard["busy"][:_BUSY_MAX]]
    if busy:
        lines.append(f"      busiest, by pushes and pulls: {'; '.join(busy)}")
    return lines
