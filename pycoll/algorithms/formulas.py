"""The costs of algorithms as formulas: steps, and bytes per rank in units of the message.

The message n is the larger of the data that one rank puts in and the data that it gets out: the
vector of an all_reduce, the gathered array of an all_gather, the data that one rank sends in an
all_to_all. The message of a barrier is one token. p is the size, L = ceil(log2 p). In the
docstrings a is the cost of one step, b the cost of moving one byte, and c the cost of reducing one
byte. A test compares every formula with the schedules.
"""

from __future__ import annotations

from fractions import Fraction
from typing import NamedTuple


class Cost(NamedTuple):
    """The maximum over all ranks of each kind of work.

    ``sent``, ``received``, ``reduced``: bytes in units of n; reduced bytes arrive and are combined.
    ``handled``: bytes sent plus bytes received by one rank, which can be another rank than the one
    that sends most. ``chunks``: the number of pieces of n, so ``sent * chunks`` messages are sent
    per tile.
    """

    steps: int
    sent: Fraction
    received: Fraction
    handled: Fraction
    reduced: Fraction = Fraction(0)
    chunks: int = 1

    @property
    def messages(self) -> int:
        """Segments per tile that the busiest rank sends or receives, whichever is more."""
        return int(max(self.sent, self.received) * self.chunks)


def cost(
    steps: int,
    sent: Fraction | int,
    received: Fraction | int,
    reduced: Fraction | int = 0,
    chunks: int = 1,
    *,
    handled: Fraction | int | None = None,
) -> Cost:
    """A Cost from whole numbers or fractions.

    If ``handled`` is not given, one rank has both the largest ``sent`` and the largest
    ``received``.
    """
    most = sent + received if handled is None else handled
    return Cost(
        steps, Fraction(sent), Fraction(received), Fraction(most), Fraction(reduced), chunks
    )


def rounds(p: int) -> int:
    """L = ceil(log2 p)."""
    return (p - 1).bit_length()


def share(p: int) -> Fraction:
    """(p-1)/p: the message without the part of one rank."""
    return Fraction(p - 1, p)


def ring_reduce_scatter(p: int) -> Cost:
    """(p-1) a + n(p-1)/p (b + c)."""
    return cost(p - 1, share(p), share(p), share(p), p)


def ring_all_gather(p: int) -> Cost:
    """(p-1) a + n(p-1)/p b."""
    return cost(p - 1, share(p), share(p), 0, p)


def ring_all_reduce(p: int) -> Cost:
    """2(p-1) a + 2n(p-1)/p b + n(p-1)/p c."""
    return cost(2 * (p - 1), 2 * share(p), 2 * share(p), share(p), p)


def one_hop(p: int) -> int:
    """1 step, or 0 if there is no other rank."""
    return min(p - 1, 1)


def direct_reduce_scatter(p: int) -> Cost:
    """Cost of one step: a + n(p-1)/p (b + c)."""
    return cost(one_hop(p), share(p), share(p), share(p), p)


def direct_all_gather(p: int) -> Cost:
    """Cost of one step: a + n(p-1)/p b. The same formula serves all_to_all."""
    return cost(one_hop(p), share(p), share(p), 0, p)


def direct_all_reduce(p: int) -> Cost:
    """2 a + 2n(p-1)/p b + n(p-1)/p c."""
    return cost(2 * one_hop(p), 2 * share(p), 2 * share(p), share(p), p)


def one_shot(p: int) -> Cost:
    """Cost of one step: a + n(p-1) (b + c)."""
    return cost(one_hop(p), p - 1, p - 1, p - 1)


def star(p: int) -> Cost:
    """At rank 0: 2 a + 2n(p-1) b + n(p-1) c."""
    return cost(2 * one_hop(p), p - 1, p - 1, p - 1)


def direct_reduce(p: int) -> Cost:
    """At the root, which receives n(p-1): a + n(p-1) (b + c)."""
    return cost(one_hop(p), one_hop(p), p - 1, p - 1, handled=p - 1)


def direct_broadcast(p: int) -> Cost:
    """At the root, which sends n(p-1): a + n(p-1) b."""
    return cost(one_hop(p), p - 1, one_hop(p), handled=p - 1)


def direct_gather(p: int) -> Cost:
    """At the root, which receives n(p-1)/p: a + n(p-1)/p b."""
    return cost(one_hop(p), Fraction(one_hop(p), p), share(p), 0, p, handled=share(p))


def direct_scatter(p: int) -> Cost:
    """At the root, which sends n(p-1)/p: a + n(p-1)/p b."""
    return cost(one_hop(p), share(p), Fraction(one_hop(p), p), 0, p, handled=share(p))


def direct_barrier(p: int) -> Cost:
    """One step: every rank sends and receives p-1 tokens."""
    return cost(one_hop(p), p - 1, p - 1)


def binomial_broadcast(p: int) -> Cost:
    """L (a + n b)."""
    return cost(rounds(p), rounds(p), one_hop(p), handled=rounds(p))


def binomial_reduce(p: int) -> Cost:
    """L (a + n b + n c)."""
    return cost(rounds(p), one_hop(p), rounds(p), rounds(p), handled=rounds(p))


def largest_subtree(p: int) -> int:
    """The number of ranks in the largest subtree below the root of a binomial tree."""
    return max((min(1 << j, p - (1 << j)) for j in range(rounds(p))), default=0)


def binomial_gather(p: int) -> Cost:
    """L a + n(p-1)/p b at the root."""
    sent = Fraction(largest_subtree(p), p)
    return cost(rounds(p), sent, share(p), 0, p, handled=share(p))


def binomial_scatter(p: int) -> Cost:
    """L a + n(p-1)/p b at the root."""
    received = Fraction(largest_subtree(p), p)
    return cost(rounds(p), share(p), received, 0, p, handled=share(p))


def scatter_all_gather(p: int) -> Cost:
    """(L+p-1) a + 2n(p-1)/p b; the child with the largest subtree receives its part twice."""
    received = share(p) + Fraction(largest_subtree(p), p)
    # That child sends its subtree's part on, except its own chunk. An only child sends nothing.
    handled = received + share(p) + Fraction(largest_subtree(p) - 1, p) if p > 2 else received
    return cost(rounds(p) + p - 1, 2 * share(p), received, 0, p, handled=handled)


def chain_broadcast(p: int) -> Cost:
    """(p-1) a + n b."""
    return cost(p - 1, one_hop(p), one_hop(p), handled=min(p - 1, 2))


def chain_reduce(p: int) -> Cost:
    """Formula: p a + n (b + c). The fold ends at rank p-1, which sends it to the root."""
    return cost(p if p > 1 else 0, one_hop(p), one_hop(p), one_hop(p))


def chain_all_reduce(p: int) -> Cost:
    """2(p-1) a + 2n b + n c."""
    both = min(p - 1, 2)
    return cost(2 * (p - 1), both, both, one_hop(p))


def chain_scan(p: int) -> Cost:
    """(p-1) a + n (b + c)."""
    return cost(p - 1, one_hop(p), one_hop(p), one_hop(p), handled=min(p - 1, 2))


def chain_exscan(p: int) -> Cost:
    """(p-1) a + 2n b + n c."""
    both = min(p - 1, 2)
    return cost(p - 1, both, both, max(both - 1, 0), handled=max(min(2 * p - 3, 4), 0))


def bruck_all_gather(p: int) -> Cost:
    """Formula: L a + n(p-1)/p b."""
    return cost(rounds(p), share(p), share(p), 0, p)


def bruck_all_to_all(p: int) -> Cost:
    """Formula: L a + about nL/2 b. Every block is sent once per set bit of its distance."""
    hops = Fraction(sum(d.bit_count() for d in range(p)), p)
    return cost(rounds(p), hops, hops, 0, p)


def dissemination(p: int) -> Cost:
    """Formula: L a."""
    return cost(rounds(p), rounds(p), rounds(p))


def cores(p: int) -> tuple[int, int, int]:
    """(k, q, f): q = 2^k is the largest power of two up to p; f is 1 if p > q (a fold)."""
    k = p.bit_length() - 1
    return k, 1 << k, int(p > 1 << k)


def doubling_all_reduce(p: int) -> Cost:
    """(k + 2f) a + (k+f) n (b + c), with k and f of `cores`."""
    k, _, f = cores(p)
    return cost(k + 2 * f, k + f, k + f, k + f)


def multiplying_all_reduce(p: int) -> Cost:
    """ceil(k/2) steps of three messages, the last of one if k is odd; a fold adds 2 steps."""
    k, _, f = cores(p)
    swaps = 3 * (k // 2) + k % 2
    return cost((k + 1) // 2 + 2 * f, swaps + f, swaps + f, swaps + f)


def scan_partners(p: int) -> int:
    """The most scan partners of one rank: ranks at a distance of a power of two, on both sides."""
    if p < 3:
        return p - 1
    half = ((p - 1) // 2).bit_length()  # partners on each side; one side may have one more
    return 2 * half + (3 << (half - 1) <= p - 1)


def doubling_scan(p: int) -> Cost:
    """L (a + n b + n c)."""
    return cost(rounds(p), rounds(p), rounds(p), rounds(p), handled=scan_partners(p))


def doubling_exscan(p: int) -> Cost:
    """(1 + L') (a + n b), with L' the rounds of p-1 ranks."""
    f, inner = one_hop(p), rounds(max(p - 1, 1))
    handled = 2 + scan_partners(p - 1) if p > 2 else f
    return cost(f + inner, f + inner, f + inner, inner, handled=handled)


def doubling_barrier(p: int) -> Cost:
    """Steps: k + 2f, with k and f of `cores`."""
    k, _, f = cores(p)
    return cost(k + 2 * f, k + f, k + f)


def halving_all_reduce(p: int) -> Cost:
    """2k a + 2n(q-1)/q b + n(q-1)/q c; a fold adds 2 a + n b + n c."""
    k, q, f = cores(p)
    most = 2 * share(q) + f
    return cost(2 * k + 2 * f, most, most, share(q) + f, q)


def paired_blocks(p: int) -> int:
    """Blocks that core 0 moves in k rounds; a core with a pair represents two ranks."""
    k, q, _ = cores(p)
    return q - 1 + sum(-(-(p - q) >> j) for j in range(1, k + 1))


def halving_reduce_scatter(p: int) -> Cost:
    """Formula: k a + n(p-1)/p (b + c). A fold adds 2 a and about n received."""
    k, _, f = cores(p)
    taken = Fraction(paired_blocks(p) + p * f, p)
    return cost(k + 2 * f, Fraction(p - 1 + f, p), taken, taken, p, handled=taken + share(p))


def doubling_all_gather(p: int) -> Cost:
    """Formula: k a + n(p-1)/p b. A fold adds 2 steps and about n sent."""
    k, _, f = cores(p)
    sent = paired_blocks(p) + f * (p - 1)
    return cost(k + 2 * f, Fraction(sent, p), share(p), 0, p)


def tree_all_reduce(p: int) -> Cost:
    """2L a + 2n b + n c."""
    most = Fraction(min(p, 4), 2) if p > 1 else Fraction(0)
    return cost(2 * rounds(p), most, most, Fraction(min(p - 1, 2), 2), 2)


def tree_broadcast(p: int) -> Cost:
    """(1 + L') a + n b, with L' the rounds of p-1 ranks."""
    f = one_hop(p)
    return cost(f + rounds(max(p - 1, 1)), f, f, 0, 2, handled=Fraction(f * min(p, 4), 2))


def tree_reduce(p: int) -> Cost:
    """(1 + L') a + n (b + c)."""
    f = one_hop(p)
    return cost(f + rounds(max(p - 1, 1)), f, f, f, 2, handled=Fraction(f * min(p, 4), 2))
