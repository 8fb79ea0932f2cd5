"""The rates of messages that travel as codes, on the hosts and links of a cluster.

H hosts have G ranks each, N = H G, and the link of a host carries B bytes/s each way. Codes take a
share r of the bytes of float32. A message of n bytes takes:

    every element    the longest of 2 (H-1)/H r n/B, the sums inside hosts, and the codec for n/G
    own places       one after the other, without sums inside hosts: G (N-G)/N r n/B to the owners,
                     min(N r, 1) (H-1)/H n/B back, and the codec
    common places    an all_reduce of r n, and the codec

Codes of places come with three exchanges of facts, common places with one.
"""

from __future__ import annotations

from math import ceil, log2
from typing import TYPE_CHECKING

from pycoll.compress import Codec
from pycoll.cost.codec_costs import COMMON, DENSE, Coded
from pycoll.gradients.communication_plan import Rate

if TYPE_CHECKING:
    from pycoll.gradients.compare import Network

#: The number of values of a message for which codes have their typical length.
_TYPICAL = 1 << 20


def coded_rate(codec: Codec, network: Network, hosts: int, per_host: int) -> Rate | None:
    """The cost of an all_reduce by bytes of the values; None for a codec that has no model."""
    described = codec.modelled(_TYPICAL)
    if described is None:
        return None
    coded = Coded(*described)
    core = next(one for one in network.codecs if one.name == coded.name)
    ranks = hosts * per_host
    several = hosts > 1
    alpha_s = network.alpha_s if several else network.local_alpha_s
    bandwidth = network.bandwidth if several else network.local_bandwidth
    ends = hosts if several else ranks
    others = (ends - 1) / ends
    rounds = ceil(log2(ends))
    if coded.way == DENSE:
        sums = 2 * (per_host - 1) / per_host / network.local_bandwidth if several else 0.0
        sums_s = 2 * (per_host - 1) * network.local_alpha_s if several else 0.0
        core_beta = core.seconds(1, 1 + others) / (per_host if several else 1)
        beta = max(sums, 2 * others * coded.ratio / bandwidth, core_beta)
        return Rate(network.agree_s + sums_s + 2 * alpha_s, beta)
    if coded.way == COMMON:
        beta = 2 * others * coded.ratio / bandwidth + core.seconds(1, 1)
        return Rate(network.agree_s + 3 * rounds * alpha_s, beta)
    sent = per_host * (ranks - per_host) / ranks if several else others
    back = min(ranks * coded.ratio, 1.0) * others
    beta = (sent * coded.ratio + back) / bandwidth + core.seconds(1, 2)
    return Rate(network.agree_s + (3 * rounds + 1) * alpha_s, beta)
