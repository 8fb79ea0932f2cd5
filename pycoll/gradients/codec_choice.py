"""The codecs that a scheduler may use: the meaning of ``compress=``, and what it refuses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from pycoll.compress import Auto, Codec
from pycoll.cost.selection import bytes_text, seconds_text
from pycoll.errors import InvalidArgumentError
from pycoll.gradients.communication_plan import (
    A2A,
    CODED_KIND,
    PS,
    CommunicationPlan,
    Gradient,
    Rates,
    coded_way,
    label_of,
)
from pycoll.gradients.layout import Entry
from pycoll.gradients.policies import AUTO, Policy


class Allowed(NamedTuple):
    """The codecs by architecture of their messages.

    ``is_choice``: whether messages may also go without a codec. ``every``: after so many steps the
    choice is made anew; 0: never.
    """

    ways: Mapping[str, Codec]
    is_choice: bool = False
    every: int = 0

    @property
    def is_fixed(self) -> bool:
        """Whether all messages travel by one codec."""
        return bool(self.ways) and not self.is_choice


def by_label(codecs: Sequence[Any]) -> dict[str, Codec]:
    """The codecs by short words that differ; raises InvalidArgumentError for what is no codec."""
    checked = Auto(list(codecs)).codecs
    words = [one.label for one in checked]
    return {
        word if words.count(word) == 1 else repr(one): one
        for word, one in zip(words, checked, strict=True)
    }


def allowed_codecs(compress: Any, name: str = "compress") -> Allowed:
    """The codecs of an argument: None, a codec, an ``Auto``, or "auto".

    Raises InvalidArgumentError for anything else. ``name``: that of the argument.
    """
    if compress is None:
        return Allowed({})
    if isinstance(compress, str) and compress == AUTO:
        compress = Auto()
    if isinstance(compress, Auto):
        ways = {coded_way(label): one for label, one in by_label(compress.codecs).items()}
        return Allowed(ways, True, compress.every)
    if not isinstance(compress, Codec):
        raise InvalidArgumentError(
            f"{name} is {compress!r}: expected a codec of pycoll.compress, a pycoll.compress.Auto, "
            "'auto', or None"
        )
    return Allowed({coded_way(compress.label): compress})


def check_codecs(
    compress: Any, policy: Policy, architecture: str | None, op: str, entries: Sequence[Entry]
) -> None:
    """Raise InvalidArgumentError where these exclude codecs."""
    if compress is None:
        return
    is_choice = allowed_codecs(compress).is_choice
    if op not in ("sum", "avg"):
        raise InvalidArgumentError(
            f"op is {op!r} and compress is {compress!r}: codecs take 'sum' or 'avg'"
        )
    if policy.name == "dear" or architecture == PS:
        what = "policy is 'dear'" if policy.name == "dear" else f"architecture is {PS!r}"
        raise InvalidArgumentError(
            f"{what} and compress is {compress!r}: codes travel by all_reduces among the ranks; "
            f"take architecture {A2A!r} and another policy, or leave compress out"
        )
    kinds = [one.kind for one in entries]
    others = [one for one in entries if one.kind != CODED_KIND]
    if others and (not is_choice or CODED_KIND not in kinds):
        more = "" if is_choice else "; a pycoll.compress.Auto lets other types go whole"
        raise InvalidArgumentError(
            f"{others[0].name!r} is {others[0].kind} and compress is {compress!r}: codecs of a "
            f"policy take {CODED_KIND}{more}"
        )


def check_device(compress: Any) -> None:
    """Raise InvalidArgumentError unless gradients on a device may travel by this."""
    if not isinstance(compress, Codec) or compress.native() is None:
        raise InvalidArgumentError(
            f"compress is {compress!r} and gradients are on a device: expected a codec that keeps "
            "every element, BF16, FP8, Block or Sign"
        )


def picks(
    names: Sequence[str],
    gradients: Sequence[Gradient],
    comm_plan: CommunicationPlan,
    rates: Rates,
) -> list[str]:
    """A line for each gradient: how it travels, and the times of its message otherwise."""
    lines = []
    messages: dict[int, list[int]] = {}
    for place, message in enumerate(comm_plan.messages):
        for piece in message.pieces:
            messages.setdefault(piece.gradient, []).append(place)
    for number, (name, gradient) in enumerate(zip(names, gradients, strict=True)):
        mine = [comm_plan.messages[place] for place in messages.get(number, ())]
        if not mine:
            continue
        ways = dict.fromkeys(one.architecture for one in mine)
        words = " and ".join(label_of(one) or "whole" for one in ways)
        longest = max(mine, key=lambda one: one.nbytes)
        told = f"  {name}: {words}, in a message of {bytes_text(longest.nbytes)}"
        if gradient.kind != CODED_KIND:
            lines.append(f"{told}, since codecs do not take {gradient.kind}")
            continue
        others = [one for one in rates.architectures if one not in ways]
        took = f"{_seconds(rates, longest.architecture, longest.nbytes)} predicted"
        more = [f"{_seconds(rates, one, longest.nbytes)} {label_of(one) or one}" for one in others]
        lines.append(", ".join([told, took, *more]))
    return lines


def _seconds(rates: Rates, architecture: str, nbytes: int) -> str:
    return seconds_text(rates.alone_s(architecture, nbytes))
