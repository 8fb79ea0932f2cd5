"""What to say when some ranks cannot reach each other: every pair with its reason, and a matrix."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pycoll.errors import TransportError

#: Pairs whose reasons are told, and ranks up to which a matrix is readable.
_PAIRS_MAX, _MATRIX_MAX = 8, 32
_ADVICE = "; PYCOLL_INTERFACES chooses networks, PYCOLL_PORT_RANGE ports to open in a firewall"

#: For each rank, in order: why it cannot reach which lower rank.
Unreached = Sequence[Mapping[int, str]]


def unreachable(names: Sequence[str], unreached: Unreached) -> TransportError:
    """The error for all ranks. Requires that some rank could not reach another one."""
    pairs = [(rank, peer) for rank, row in enumerate(unreached) for peer in sorted(row)]
    told = [
        f"rank {rank} ({names[rank]}) cannot reach rank {peer} ({names[peer]}) "
        f"{unreached[rank][peer]}"
        for rank, peer in pairs[:_PAIRS_MAX]
    ]
    if len(pairs) > _PAIRS_MAX:
        told.append(f"and {len(pairs) - _PAIRS_MAX} more pairs")
    text = "; ".join(told) + (_ADVICE if "over tcp" in "".join(told) else "")
    blamed = sorted({peer for _, peer in pairs})
    return TransportError(
        "\n".join([text, *matrix(unreached)]),
        rank=blamed[0] if len(blamed) == 1 else None,
        ranks=blamed,
        operation="init",
    )


def matrix(unreached: Unreached) -> list[str]:
    """Who reaches whom, a line for each rank: yes, no, or nothing for the rank itself."""
    size = len(unreached)
    if size > _MATRIX_MAX:
        return []
    width = len(str(size - 1)) + 1
    lines = ["who reaches whom (+ yes, - no):"]
    lines.append(" " * width + "".join(f"{rank:>{width}}" for rank in range(size)))
    for rank in range(size):
        cells = [_cell(unreached, rank, peer) for peer in range(size)]
        lines.append(f"{rank:>{width}}" + "".join(f"{cell:>{width}}" for cell in cells))
    return [line.rstrip() for line in lines]


def _cell(unreached: Unreached, rank: int, peer: int) -> str:
    if rank == peer:
        return ""
    # The higher rank connects, so one failure is that of both.
    return "-" if min(rank, peer) in unreached[max(rank, peer)] else "+"
