"""The error for ranks that cannot reach each other: every pair with its reason, and a matrix."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pycoll.errors import TransportError

#: Most pairs whose reasons the text names, and most ranks for which it shows a matrix.
_PAIRS_MAX, _MATRIX_MAX = 8, 32
_ADVICE = "; PYCOLL_INTERFACES chooses networks, PYCOLL_PORT_RANGE ports to open in a firewall"

#: For each rank, in order: the lower ranks that it cannot reach, each with the reason.
Unreached = Sequence[Mapping[int, str]]


def unreachable(names: Sequence[str], unreached: Unreached) -> TransportError:
    """Make the error for all ranks. Requires that some rank could not reach another one."""
    pairs = [(rank, peer) for rank, row in enumerate(unreached) for peer in sorted(row)]
    reasons = [
        f"rank {rank} ({names[rank]}) cannot reach rank {peer} ({names[peer]}) "
        f"{unreached[rank][peer]}"
        for rank, peer in pairs[:_PAIRS_MAX]
    ]
    if len(pairs) > _PAIRS_MAX:
        reasons.append(f"and {len(pairs) - _PAIRS_MAX} more pairs")
    text = "; ".join(reasons) + (_ADVICE if "over tcp" in "".join(reasons) else "")
    blamed = sorted({peer for _, peer in pairs})
    return TransportError(
        "\n".join([text, *matrix(unreached)]),
        rank=blamed[0] if len(blamed) == 1 else None,
        ranks=blamed,
        operation="init",
    )


def matrix(unreached: Unreached) -> list[str]:
    """Format the reachability matrix: a row per rank, + for yes, - for no, empty on the diagonal.
    Returns no lines for more than 32 ranks."""
    size = len(unreached)
    if size > _MATRIX_MAX:
        return []
    width = len(str(size - 1)) + 1
    lines = ["reachable pairs of ranks (+ yes, - no):"]
    lines.append(" " * width + "".join(f"{rank:>{width}}" for rank in range(size)))
    for rank in range(size):
        cells = [_cell(unreached, rank, peer) for peer in range(size)]
        lines.append(f"{rank:>{width}}" + "".join(f"{cell:>{width}}" for cell in cells))
    return [line.rstrip() for line in lines]


def _cell(unreached: Unreached, rank: int, peer: int) -> str:
    if rank == peer:
        return ""
    # Only the higher rank connects, so its failure counts for both directions.
    return "-" if min(rank, peer) in unreached[max(rank, peer)] else "+"
