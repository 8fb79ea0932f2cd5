"""The methods by name: each is a policy with an architecture.

The survey of Shi et al. (arXiv 2005.13247) compares seven methods. The table has its names and
pycoll's own. Every argument that takes a policy takes these names as well.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from pycoll.errors import InvalidArgumentError
from pycoll.gradients.communication_plan import A2A, ARCHITECTURES, PS
from pycoll.gradients.policies import AUTO, POLICIES, Policy


class Method(NamedTuple):
    """A method: a policy with an architecture.

    Arguments: ``policy``, the name of its policy; ``architecture``, "a2a", "ps" or "auto", which is
    a choice; ``summary``, what it does.

    Errors and cost: none.

    Source: Shi et al., arXiv 2005.13247, for seven entries of ``METHODS``.

    >>> pycoll.optim.METHODS["MG-WFBP"].policy
    'mg_wfbp'
    """

    policy: str
    architecture: str
    summary: str


#: The methods by name, in the order of the survey, then pycoll's own.
METHODS: dict[str, Method] = {
    "BSP-PS": Method("bsp", PS, "all gradients to servers after the backward pass"),
    "WFBP-PS": Method("wfbp", PS, "each gradient to servers as soon as it is ready"),
    "ByteScheduler-PS": Method(
        "bytescheduler", PS, "parts to servers, those of front layers first"
    ),
    "BSP-A2A": Method("bsp", A2A, "one all-reduce after the backward pass"),
    "WFBP-A2A": Method("wfbp", A2A, "an all-reduce for each gradient as soon as it is ready"),
    "MG-WFBP": Method("mg_wfbp", A2A, "neighbours merged, so that the last message ends early"),
    "ByteScheduler-A2A": Method("bytescheduler", A2A, "parts, front layers first"),
    "fixed": Method("fixed", AUTO, "neighbours merged up to a size"),
    "dear": Method("dear", A2A, "reduce-scatter in the backward pass, all-gather after it"),
    "auto": Method(AUTO, AUTO, "the shortest step that the search finds"),
}
_BY_WORD = {name.lower(): method for name, method in METHODS.items()}


def method_of(policy: Any, architecture: str | None = None) -> tuple[Policy, str | None]:
    """The policy and the architecture of two arguments; None where neither names one.

    ``policy``: a ``Policy``, the name of a policy, or the name of a method, in any case.
    ``architecture``: "a2a", "ps", "auto" or None. Raises InvalidArgumentError for unknown words,
    and where the method and the argument contradict each other.
    """
    words = (*ARCHITECTURES, AUTO)
    if architecture is not None and architecture not in words:
        raise InvalidArgumentError(
            f"architecture is {architecture!r}: expected one of {', '.join(words)}"
        )
    if isinstance(policy, Policy):
        found, given = policy, architecture
    elif not isinstance(policy, str):
        raise InvalidArgumentError(
            f"policy is {policy!r}: expected a name or a pycoll.optim.Policy"
        )
    elif policy in (*POLICIES, AUTO):
        found, given = Policy(policy), architecture
    elif policy.lower() in _BY_WORD:
        method = _BY_WORD[policy.lower()]
        if architecture not in (None, method.architecture):
            raise InvalidArgumentError(
                f"policy is {policy!r} and architecture is {architecture!r}: that method has the "
                f"architecture {method.architecture!r}; leave out one of the two"
            )
        found, given = Policy(method.policy), method.architecture
    else:
        names = ", ".join(dict.fromkeys((*POLICIES, *METHODS)))
        raise InvalidArgumentError(f"policy is {policy!r}: expected one of {names}")
    if found.name == "dear" and given == PS:
        able = ", ".join(name for name in (*POLICIES, AUTO) if name != "dear")
        raise InvalidArgumentError(
            f"policy is 'dear' and architecture is {PS!r}: it cuts an all_reduce in halves; "
            f"policies for servers are {able}"
        )
    return found, given
