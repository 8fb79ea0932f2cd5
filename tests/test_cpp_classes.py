"""The width of C++ classes: at most 12 public methods, and constructors of at most 6 arguments.

Constructors, operators, overrides and constant accessors without arguments do not count. Headers
are read as text in clang-format's layout.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
METHODS = 12
ARGUMENTS = 6
#: Classes that are wider, with their methods. Entries may only go, and numbers may only fall.
WIDE = {
    "csrc/device/communicator.h: Communicator": 17,
    "csrc/device/kernels/protocols.h: Ll": 14,
    "csrc/kernels/cpu/lanes.h: VectorUnit": 20,
    "csrc/shared_memory/shm_arena.h: Arena": 15,
    "csrc/transport/sim/sim_world.h: SimWorld": 15,
    "csrc/transport/verbs/verbs_link.h: VerbsLink": 20,
}
#: Longer constructors, with their arguments, likewise.
LONG_CONSTRUCTORS = {"csrc/device/programs.h: Programs": 7}

_CLASS = re.compile(r"\b(class|struct)\s+(?:\[\[\w+\]\]\s*)?(\w+)\s*(?:final\s*)?(?::[^;{()]*)?\{")
_LABEL = re.compile(r"\s*(public|private|protected)\s*:$")
_FUNCTION = re.compile(r"([~\w]+)\s*\(((?:[^()]|\([^()]*\))*)\)([^()]*)$")
#: Stands for the body of a function.
_BODY = "\0"


def plain(text: str) -> str:
    """The text without comments and contents of strings."""
    return re.sub(r'"(\\.|[^"\\\n])*"', '""', re.sub(r"//[^\n]*", "", text))


def end_of_block(text: str, begin: int) -> int:
    """The place behind the brace that closes the block that begins at `begin`."""
    depth = 0
    for place in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return place + 1
    raise AssertionError("a brace is not closed")


def statements(body: str) -> Iterator[str]:
    """The declarations of a class, and its labels ("public:")."""
    statement, depth, place = "", 0, 0
    while place < len(body):
        one = body[place]
        depth += {"(": 1, ")": -1}.get(one, 0)
        if one == "{" and depth == 0:
            place = end_of_block(body, place)
            statement += _BODY
            if body[place:].lstrip()[:1] not in (";", ","):
                yield statement
                statement = ""
            continue
        if one == ";" and depth == 0:
            yield statement
            statement = ""
        else:
            statement += one
            if _LABEL.match(statement) and not body[place + 1 :].startswith(":"):
                yield statement.strip()
                statement = ""
        place += 1


def signature(declaration: str) -> tuple[str, list[str], str] | None:
    """Name, arguments and what follows of a function; None for everything else."""
    text = re.sub(r"^template\s*<[^>]*>\s*", "", " ".join(declaration.split()))
    if re.match(r"(using|friend|enum|struct|class|static_assert)\b", text) or "operator" in text:
        return None
    head = text.split(_BODY)[0].split(" : ")[0]
    found = _FUNCTION.search(head)
    if found is None or "=" in head[: found.start()] or "(" in head[: found.start()]:
        return None
    return found[1], [one for one in found[2].split(",") if one.strip()], found[3]


def wide_classes(text: str) -> Iterator[tuple[str, int, int]]:
    """For each class its name, its public methods that count, and its longest constructor."""
    text = plain(text)
    for match in _CLASS.finditer(text):
        kind, name = match[1], match[2]
        body = text[match.end() : end_of_block(text, match.end() - 1) - 1]
        public, methods, longest = kind == "struct", 0, 0
        for statement in statements(body):
            if label := _LABEL.match(statement):
                public = label[1] == "public"
                continue
            function = signature(statement)
            if function is None:
                continue
            called, arguments, behind = function
            if called == name:
                longest = max(longest, len(arguments))
            accessor = not arguments and "const" in behind
            skipped = accessor or "override" in behind or re.search("= (delete|default)", behind)
            if public and not skipped and called.lstrip("~") != name:
                methods += 1
        yield name, methods, longest


def test_classes_are_narrow() -> None:
    example = """
    class Both final : public Base {
     public:
      Both(int a, int b);
      int a() const { return a_; }
      void run(const Copies& copies = {}) override;
      template <typename T> void set(T value) { if (value) { a_ = 1; } }
      static int (*call)(int);
      void go();  // void not_this();
     private:
      void inner();
      int a_ = 0;
    };"""
    assert list(wide_classes(example)) == [("Both", 2, 2)]
    methods, arguments = {}, {}
    for folder in ("csrc", "bindings"):
        for path in sorted((ROOT / folder).rglob("*.h")):
            for name, count, longest in wide_classes(path.read_text()):
                place = f"{path.relative_to(ROOT)}: {name}"
                methods[place] = max(count, methods.get(place, 0))
                arguments[place] = longest
    assert len(methods) > 200
    assert {place: count for place, count in methods.items() if count > METHODS} == WIDE
    longer = {place: count for place, count in arguments.items() if count > ARGUMENTS}
    assert longer == LONG_CONSTRUCTORS
