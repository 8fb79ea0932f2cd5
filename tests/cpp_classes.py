"""A parser of the classes in clang-formatted C++ headers: their public functions and constructors.

It reads the text of one header and expands no macros. In clang-format's layout a ``<`` behind a
word begins template arguments; an operator has spaces around it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

_IGNORED = re.compile(
    r"//[^\n]*|/\*.*?\*/|^[ \t]*#(?:[^\n]*\\\n)*[^\n]*$"
    r"|R\"(\w*)\(.*?\)\1\"|\"(?:\\.|[^\"\\\n])*\"|(?<!\w)'(?:\\.|[^'\\\n])*'",
    re.DOTALL | re.MULTILINE,
)
_OPERATOR = re.compile(r"\boperator\s*(?:\(\)|\[\]|[^\s\w(]+)")
_PREFIX = re.compile(r"^(?:template(?: requires\b[^;{]*?\()? |\[ |alignas\( )*")
_NAMESPACE = re.compile(r"^(?:inline )?(?:namespace ?([\w:]*)|extern \") ?\{")
_CLASS = re.compile(r"^(class|struct|union) (?:\[ |alignas\( )*([\w:]+)[^({=]*\{")
_ACCESS = re.compile(r"\s*(public|protected|private)\s*$")
_NO_MEMBER = re.compile(r"^(?:friend|using|typedef|static_assert|enum)\b|\boperator")
_FUNCTION = re.compile(r"^[^=]*?(~?\b(?!(?:alignas|decltype|explicit|noexcept)\()\w+)(\()")
_CLOSING = {"(": ")", "[": "]", "{": "}"}


@dataclass
class CppClass:
    """A class with its namespaces below pycoll, as in "engine::Communicator".

    ``functions``: the names of its public functions, except constructors, destructors, operators,
    overrides and const functions without parameters. ``parameters``: the largest number of
    parameters of a constructor. ``modes``: the largest number of those of one that are booleans.
    """

    name: str
    functions: set[str] = field(default_factory=set)
    parameters: int = 0
    modes: int = 0


def cpp_classes(text: str) -> list[CppClass]:
    """Return the classes that a header defines, nested ones included."""
    text = _IGNORED.sub(lambda match: '"' if match[0][0] in "\"'R" else " ", text)
    text = _OPERATOR.sub("operator_", text).replace("template <", "template<")
    found: list[CppClass] = []
    _read_scope(text, (), None, "public", found)
    return found


def _read_scope(
    text: str, names: tuple[str, ...], owner: CppClass | None, access: str, found: list[CppClass]
) -> None:
    for one in _declarations(text):
        if match := _ACCESS.match(one):
            access = match[1]
            continue
        places, flat = _flatten(one)
        begin = flat.find("{")
        body = one[places[begin] + 1 : _end_of(one, places[begin]) - 1] if begin >= 0 else ""
        if match := _NAMESPACE.match(flat):
            _read_scope(body, (*names, *(match[1] or "").split("::")), None, "public", found)
        elif match := _CLASS.match(flat):
            inner = (*names, *match[2].split("::"))
            made = CppClass("::".join(name for name in inner if name not in ("", "pycoll")))
            found.append(made)
            _read_scope(body, inner, made, "private" if match[1] == "class" else "public", found)
        elif owner is not None:
            _note_member(owner, one, access)


def _note_member(owner: CppClass, declaration: str, access: str) -> None:
    places, flat = _flatten(declaration)
    match = _FUNCTION.match(flat)
    if match is None or _NO_MEMBER.search(flat[: match.end()]):
        return
    name, begin = match[1], places[match.start(2)]
    inside = declaration[begin + 1 : _end_of(declaration, begin) - 1]
    outer = "".join(char for _, char in _outside_brackets(inside))
    parameters = outer.count(",") + 1 if outer.strip() else 0
    behind = re.split(r"[{:=]", flat[match.end() :])[0].split()
    is_accessor = parameters == 0 and "const" in behind
    if name == owner.name.rpartition("::")[2]:
        owner.parameters = max(owner.parameters, parameters)
        booleans = re.findall(r"(?:^|,)\s*(?:const )?bool\b", outer)
        owner.modes = max(owner.modes, len(booleans))
    elif access == "public" and name[0] != "~" and "override" not in behind and not is_accessor:
        owner.functions.add(name)


def _declarations(text: str) -> Iterator[str]:
    """Yield the declarations of a scope with their bodies, and the words in front of ``:``."""
    begin = 0
    for at, char in _outside_brackets(text):
        if at < begin:
            continue
        if char == ";" or (char == ":" and _ACCESS.match(text[begin:at])):
            yield text[begin:at]
            begin = at + 1
        elif char == "{":
            end = _end_of(text, at)
            if text[end:].lstrip()[:1] not in (";", ",", "{"):  # the end of a body
                yield text[begin:end]
                begin = end


def _flatten(declaration: str) -> tuple[list[int], str]:
    """Return the text outside of brackets on one line without templates, and where it stands."""
    kept: list[tuple[int, str]] = []
    for at, char in _outside_brackets(declaration):
        if not char.isspace():
            kept.append((at, char))
        elif kept and kept[-1][1] != " ":
            kept.append((at, " "))
    flat = "".join(char for _, char in kept)
    skipped = len(_PREFIX.match(flat)[0])  # type: ignore[index]
    return [at for at, _ in kept[skipped:]], flat[skipped:]


def _outside_brackets(text: str) -> Iterator[tuple[int, str]]:
    """Yield the characters outside of brackets; an opening bracket stands for all it encloses."""
    at = angles = 0
    while at < len(text):
        char = text[at]
        if char == "<" and re.match(r"\w", text[at - 1 : at]):
            angles += 1
        elif char == ">" and angles and text[at - 1] != "-":
            angles -= 1
        elif not angles:
            yield at, char
        at = _end_of(text, at) if char in _CLOSING else at + 1


def _end_of(text: str, begin: int) -> int:
    """Return the place behind the bracket that closes the one at ``begin``."""
    depth = 0
    for at in range(begin, len(text)):
        depth += (text[at] in "([{") - (text[at] in ")]}")
        if depth == 0:
            return at + 1
    raise ValueError(f"nothing closes {text[begin : begin + 40]!r}")
