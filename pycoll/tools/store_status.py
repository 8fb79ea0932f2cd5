"""The text of ``pycoll ps``: the stores whose servers run on this host."""

from __future__ import annotations

import time
from typing import Any

from pycoll.ps.reports.store_figures import display_name, waiting_text
from pycoll.ps.status import running_servers

#: The most parts that the list of busy parts names.
_BUSY_MAX = 5
#: The counts of a shard that a server did not hold before.
_NONE = {"pushes": 0, "pulls": 0}


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
            lines.append(
                f"store {store}, {one['consistency']}, view {one['view']}, "
                f"view manager rank {one['manager']}"
            )
        left_out = f": shards left out, since {one['left_out']}" if one["left_out"] else ""
        lines.append(f"  server rank {one['rank']} (pid {one['pid']}){left_out}")
        earlier = old.get((one["store"], one["rank"]), {"shards": []})
        counts = {shard["shard"]: shard for shard in earlier["shards"]}
        for shard in one["shards"]:
            lines += _shard_lines(shard, counts.get(shard["shard"], _NONE), seconds)
    return "\n".join(lines)


def _shard_lines(shard: dict[str, Any], old: dict[str, Any], seconds: float) -> list[str]:
    chain = " -> ".join(map(str, shard["chain"]))
    clocks = ", ".join(f"{rank}: {clock}" for rank, clock in shard["clocks"].items())
    pushes, pulls = (max(0, shard[one] - old[one]) / seconds for one in ("pushes", "pulls"))
    gone = f"; gone {shard['gone']}" if shard["gone"] else ""
    lines = [
        f"    shard {shard['shard']}: chain {chain}; {shard['bytes']} bytes in parts: "
        f"{shard['parts']}; {pushes:.0f} pushes/s, {pulls:.0f} pulls/s; "
        f"{waiting_text(shard['waiting'])}; clocks {clocks}{gone}"
    ]
    busy = [
        f"{display_name(one)} part {one['part']}: {one['uses']}"
        for one in shard["busy"][:_BUSY_MAX]
    ]
    if busy:
        lines.append(f"      busiest, by pushes and pulls: {'; '.join(busy)}")
    return lines
