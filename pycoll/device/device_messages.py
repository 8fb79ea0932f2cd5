"""Divides messages on device arrays into launches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from pycoll import _core
from pycoll.arrays.p2p_message import P2PMessage
from pycoll.device.message_plans import message_plan
from pycoll.errors import InvalidArgumentError

#: Plans that a communicator keeps.
_PLANS_MAX = 1024


def rounds_of(messages: Sequence[P2PMessage], rank: int) -> list[list[P2PMessage]]:
    """Return the launches of a group, in order.

    The k-th message of a pair and direction, by tag and then by call, is in the k-th launch of both
    ranks, whatever else they send. Raises InvalidArgumentError for a message of the rank to itself
    that lacks its send or recv.
    """
    rounds: list[list[P2PMessage]] = []
    places: Counter[tuple[bool, int]] = Counter()
    for one in sorted(messages, key=lambda one: one.tag):
        place = places[one.sends, one.peer]
        places[one.sends, one.peer] += 1
        if place == len(rounds):
            rounds.append([])
        rounds[place].append(one)
    for members in rounds:
        members.sort(key=lambda one: (not one.sends, one.peer))
        _check_own([one for one in members if one.peer == rank])
    return rounds


def _check_own(own: Sequence[P2PMessage]) -> None:
    """Check that one launch's messages of the rank to itself are one send and its recv."""
    if not own:
        return
    first = own[0]
    if len(own) != 2 or first.tag != own[1].tag:
        raise InvalidArgumentError(
            f"the {first.text} is between this rank and itself, on a device: put the send and the "
            "recv in one group"
        )
    if first.view.nbytes != own[1].view.nbytes:
        raise InvalidArgumentError(
            f"the {first.text} is of {first.view.nbytes} bytes to this rank itself, but the recv "
            f"takes {own[1].view.nbytes}"
        )


class MessagePlans:
    """The plans of one rank's launches, by the peers it sends to and receives from."""

    def __init__(self, size: int, rank: int) -> None:
        self._size = size
        self._rank = rank
        self._plans: dict[tuple[tuple[int, ...], tuple[int, ...]], _core.Plan] = {}

    def of(self, members: Sequence[P2PMessage], lanes: int) -> _core.Plan:
        """Return the plan of one launch, of at most ``lanes`` lanes; ``lanes`` never changes."""
        sends = tuple(one.peer for one in members if one.sends)
        recvs = tuple(one.peer for one in members if not one.sends)
        found = self._plans.get((sends, recvs))
        if found is None:
            if len(self._plans) >= _PLANS_MAX:
                self._plans.clear()
            found = _core.Plan(
                message_plan(
                    self._size, self._rank, sends, recvs, _core.DEVICE_MESSAGE_NUMBER, lanes
                )
            )
            self._plans[sends, recvs] = found
        return found
