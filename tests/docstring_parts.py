"""The parts of a docstring, their order, and the examples in it.

A docstring of a public name has these parts, in this order: one line of what it does; arguments
with shapes, dtypes and units; result; errors; cost; source of the algorithm; a short example.
Paragraphs without a label may stand anywhere.
"""

from __future__ import annotations

import doctest
import inspect
import io
import re
from collections.abc import Sequence
from typing import Any

from harness import world_in_threads

#: The labels of the parts, in their order. A sentence begins with a label.
LABELS = {
    "arguments": r"Arguments\b|The arguments\b|``\w+``(?:,\s``\w+``)*:\s",
    "result": r"Result:\s|Returns?\s",
    "errors": r"Errors(?: and cost)?:\s|Raises?\s",
    "cost": r"Cost:\s|Errors and cost:\s",
    "source": r"Source:\s",
    "example": r">>> ",
}
_SENTENCE = r"(?:^|(?<=[.;:)] ))"
#: A docstring may refer to another one for its arguments.
_ELSEWHERE = re.compile(r"\b(those|as) (of|in)\b")


def public_names(package: Any, names: Sequence[str] = ()) -> dict[str, Any]:
    """The functions and classes that a package exports, or those of these names."""
    found = {name: getattr(package, name) for name in names or package.__all__}
    return {name: one for name, one in found.items() if inspect.isroutine(one) or _is_class(one)}


def faults_of(thing: Any, made_elsewhere: bool = False) -> list[str]:
    """What a docstring lacks, and what stands in another order.

    ``made_elsewhere``: the thing is a class whose objects programs get from a function.
    """
    text = inspect.cleandoc(thing.__doc__ or "")
    first, _, rest = text.partition("\n")
    faults = []
    if not first.endswith(".") or not (rest == "" or rest.startswith("\n")):
        faults.append("the first line is no sentence by itself")
    found = _places(text)
    wanted = {"errors", "cost", "example"}
    is_error = _is_class(thing) and issubclass(thing, BaseException)
    signature = inspect.Signature() if is_error else inspect.signature(thing)
    if not made_elsewhere:
        lacks = [n for n in signature.parameters if not re.search(rf"``{n}(``|=)", text)]
        if lacks and not _ELSEWHERE.search(text):
            faults.append(f"arguments without a word: {', '.join(lacks)}")
        if signature.parameters:
            wanted.add("arguments")
    if not _is_class(thing) and signature.return_annotation not in ("None", None):
        wanted.add("result")
    faults += [f"no {part}" for part in LABELS if part in wanted and part not in found]
    order = sorted(found, key=lambda part: found[part])
    if order != [part for part in LABELS if part in found]:
        faults.append("the order is " + ", ".join(order))
    return faults


def examples_of(thing: Any) -> list[doctest.Example]:
    return doctest.DocTestParser().get_examples(inspect.cleandoc(thing.__doc__ or ""))


def ranks_of(thing: Any, default: int = 1) -> int:
    """The number of ranks in a comment of the example: "on 3 ranks"."""
    comments = " ".join(example.source for example in examples_of(thing))
    return int((re.search(r"on (\d+) ranks", comments) or [0, default])[1])


def run_examples(thing: Any, scope: dict[str, Any]) -> None:
    """Run the examples by doctest."""
    text = inspect.cleandoc(thing.__doc__ or "")
    test = doctest.DocTestParser().get_doctest(text, scope, thing.__name__, None, None)
    assert test.examples
    said = io.StringIO()
    runner = doctest.DocTestRunner(verbose=False, optionflags=doctest.FAIL_FAST)
    runner.run(test, out=said.write, clear_globs=False)
    assert runner.failures == 0, said.getvalue()


def run_on_ranks(thing: Any, scope: dict[str, Any], size: int, shown: int = 0) -> None:
    """Run the examples on each rank of a world; the results are those of rank ``shown``."""
    examples = examples_of(thing)

    def rank(comm: Any) -> list[str]:
        names = {"comm": comm, **scope}
        output = []
        for example in examples:
            if example.want:
                output.append(repr(eval(example.source, names)))
            else:
                exec(example.source, names)
                output.append("")
        return output

    found = world_in_threads(size).run(rank)[shown]
    assert found == [example.want.rstrip("\n") for example in examples]


def _is_class(thing: Any) -> bool:
    return isinstance(thing, type)


def _places(text: str) -> dict[str, int]:
    """Where each part that the text has begins."""
    body = text.partition("\n\n")[2]
    found = {}
    for part, label in LABELS.items():
        one = re.search(f"(?m){_SENTENCE}(?:{label})", body)
        if one is not None:
            found[part] = one.start()
    if re.match("Returns? ", text):
        # The first line is the result. A later sentence may say more of it.
        found.pop("result", None)
        found["result"] = found.get("arguments", -1) + 0.5  # type: ignore[assignment]
    if "Errors and cost: " in body:
        found["cost"] = found["errors"] + 0.5  # type: ignore[assignment]
    return found
