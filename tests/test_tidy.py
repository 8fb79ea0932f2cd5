"""The house's rules as tests: sizes, layers, words, comments, and documents that name what exists.

Every check is a function from a text to findings, and is itself shown a text that it must refuse.
Formatters, linters and clang-tidy run apart, by ``make lint``.
"""

from __future__ import annotations

import ast
import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import pycoll
from pycoll.config import RENAMED

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("csrc", "bindings", "pycoll", "tests", "bench", "examples")
CODE = (".h", ".cpp", ".py")
FILE_LINES = 900
FUNCTION_LINES = 60
COLUMNS = 100
#: Longer files that are waiting to be split. Entries may only go.
LONG_FILES: tuple[str, ...] = ()
#: Comment lines among the lines of a header of csrc, on the average; headers are contracts.
COMMENT_SHARE = 0.25


def files(*endings: str) -> list[Path]:
    found = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*")]
    return sorted(path for path in found if path.suffix in endings and path.is_file())


def documents() -> list[Path]:
    return sorted([*ROOT.glob("*.md"), *files(".md")])


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def is_mine(path: Path) -> bool:
    return path == Path(__file__).resolve()


def all_findings(check: object, paths: list[Path]) -> list[str]:
    assert callable(check)
    assert len(paths) > 3, "the files were not found"
    return [f"{name_of(p)}: {one}" for p in paths for one in check(p.read_text())]


# Sizes


def long_lines(text: str) -> list[str]:
    return [f"line {n}" for n, line in enumerate(text.splitlines(), 1) if len(line) > COLUMNS]


def test_lines_fit_100_columns() -> None:
    assert long_lines("x" * 100 + "\n" + "x" * 101) == ["line 2"]
    paths = [*files(*CODE, ".sh", ".txt", ".pyi"), ROOT / "Makefile", ROOT / "CMakeLists.txt"]
    assert all_findings(long_lines, paths) == []


def test_files_fit_900_lines() -> None:
    lengths = {name_of(p): len(p.read_text().splitlines()) for p in files(*CODE)}
    long = {name for name, lines in lengths.items() if lines > FILE_LINES}
    assert long == set(LONG_FILES), "split by concept; take names that are short again off the list"


def long_python_functions(text: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        lines = (node.end_lineno or 0) - node.lineno + 1
        if ast.get_docstring(node):
            told = node.body[0]
            lines -= (told.end_lineno or 0) - told.lineno + 1
        if lines > FUNCTION_LINES:
            yield f"{node.name} has {lines} lines"


#: In clang-format's layout a function outside classes begins and ends in the first column.
_CPP_BLOCK = re.compile(r"^(?!namespace|extern)[A-Za-z~].*\{$")
_CPP_DATA = re.compile(r"^(class|struct|enum|union)\b|=\s*\{+$|\{\{$")


def long_cpp_functions(text: str) -> Iterator[str]:
    first, head = 0, ""
    for number, line in enumerate(text.splitlines(), 1):
        if _CPP_BLOCK.match(line) or (head == "" and line.endswith(") {") and line[0] == " "):
            first, head = number, line
        elif line.startswith("}"):
            lines = number - first + 1
            if head and lines > FUNCTION_LINES and not _CPP_DATA.search(head):
                yield f"{head} has {lines} lines"
            first, head = 0, ""


def test_functions_fit_on_a_screen() -> None:
    body = "    pass\n" * 60
    assert list(long_python_functions("def f():\n" + body)) == ["f has 61 lines"]
    assert list(long_python_functions('def f():\n    """Say."""\n' + body[9:])) == []
    assert list(long_cpp_functions("int f() {\n" + "  g();\n" * 59 + "}\n"))
    assert list(long_cpp_functions("int f() {\n" + "  g();\n" * 58 + "}\n")) == []
    assert list(long_cpp_functions("int f(int a,\n      int b) {\n" + "  g();\n" * 60 + "}\n"))
    assert all_findings(long_python_functions, files(".py")) == []
    assert all_findings(long_cpp_functions, files(".h", ".cpp")) == []


# Layers

#: What each layer of C++ may include, apart from itself.
BELOW = {
    "base": (),
    "plan": ("base",),
    "kernels": ("base",),
    "shared_memory": ("base",),
    "transport": ("base", "shared_memory"),
    "executor": ("base", "plan", "kernels", "shared_memory", "transport"),
    "engine": ("base", "plan", "kernels", "shared_memory", "transport", "executor"),
    "device": ("base", "plan", "kernels", "transport", "executor", "engine"),
    "bindings": (
        *("base", "plan", "kernels", "shared_memory", "transport", "executor", "engine", "device"),
    ),
}


def forbidden_includes(layer: str, text: str) -> list[str]:
    allowed = {layer, *BELOW[layer]}
    return [
        f"includes {target}"
        for target in re.findall(r'#include "([^"]+)"', text)
        if target.partition("/")[0] not in allowed and "/" in target
    ]


def layer_of(path: Path) -> str:
    parts = path.relative_to(ROOT).parts
    return parts[1] if parts[0] == "csrc" else parts[0]


def test_layers_include_only_what_is_below() -> None:
    assert forbidden_includes("plan", '#include "transport/shm/shm.h"\n#include "base/types.h"')
    sources = [p for p in files(".h", ".cpp") if layer_of(p) in BELOW]
    assert {layer_of(path) for path in sources} == set(BELOW)
    found = [
        (name_of(p), one) for p in sources for one in forbidden_includes(layer_of(p), p.read_text())
    ]
    assert found == []


def test_shared_memory_has_one_public_header() -> None:
    private = re.compile(r'#include "shared_memory/(?!shm_arena\.h")')
    assert words_found(private, '#include "shared_memory/shm_holes.h"')
    sources = [p for p in files(".h", ".cpp") if layer_of(p) in {*BELOW} - {"shared_memory"}]
    assert all_findings(lambda text: words_found(private, text), sources) == []


#: What names a collective, its numbers of ranks, or the sharing of cores.
COLLECTIVE = re.compile(
    r"\bCollective\b|\.collective\b|\b(?:reduces|has_root)\(|\b(?:servers|workers)\b|"
    r"\bheader(?:\(\))?(?:\.|->)(?:size|root|collective)\b|"
    r"\b(?:CoreHints|core_hints|share_cores)\b"
)


def reached_headers(path: Path) -> set[str]:
    """The headers of csrc that a file includes, directly or through others."""
    found: set[str] = set()
    waiting = [path]
    while waiting:
        targets = set(re.findall(r'#include "([^"]+)"', waiting.pop().read_text())) - found
        found |= targets
        waiting += [ROOT / "csrc" / target for target in targets]
    return found


def test_the_executor_knows_no_collective() -> None:
    """Plan and request tell it what to do, in numbers that mean the same in every collective."""
    for text in (
        "plan::reduces(descriptor.collective)",
        "uncached_bytes(plan.header->size)",
        "request_.plan->header().servers == 0",
        "static_cast<Collective>(header.collective)",
        "held_.assign(std::max(1u, header.size), 0);",
    ):
        assert words_found(COLLECTIVE, text), text
    assert not words_found(COLLECTIVE, "CollectiveRequest request, header.bytes, rows.size()")
    sources = [path for path in files(".h", ".cpp") if layer_of(path) == "executor"]
    assert all_findings(lambda text: words_found(COLLECTIVE, text), sources) == []
    assert "plan/image.h" in reached_headers(ROOT / "csrc/executor/bound_plan.cpp")
    assert [name_of(p) for p in sources if "plan/layout.h" in reached_headers(p)] == []


def test_the_build_of_kernels_knows_their_headers() -> None:
    """A header that it does not list changes without a new build of the kernels."""
    text = (ROOT / "csrc/device/cuda.cmake").read_text()
    (names,) = re.findall(r"(?s)set\(headers (.*?)\)", text)
    (short,) = re.findall(r"(?s)foreach\(name (.*?)\)", text)
    listed = {*names.split(), *(f"device/kernels/{name}.h" for name in short.split())}
    assert listed == reached_headers(ROOT / "csrc/device/kernels/kernels.cu")


#: The folders of these layers, and which others of its layer each may include. A layer's own files
#: may include its folders, and a folder those files: units, not folders, have no cycle there. The
#: same holds for a folder and its subfolders, as in executor/rows, kernels/cpu and verbs/link.
FOLDERS_BELOW = {
    "csrc/transport/shm": set(),
    "csrc/transport/tcp": set(),
    "csrc/transport/sim": set(),
    "csrc/transport/verbs": {"csrc/transport/tcp"},  # its sockets, for the life of a peer
    "csrc/engine/waiting": set(),
    "csrc/engine/operations": set(),
    "csrc/engine/diagnosis": {"csrc/engine/operations"},
    "csrc/device/kernels": set(),
    "csrc/device/driver": {"csrc/device/kernels"},
    "csrc/device/memory": {"csrc/device/kernels", "csrc/device/driver"},
    "csrc/device/host_proxy": {
        *("csrc/device/kernels", "csrc/device/driver", "csrc/device/memory"),
    },
    "csrc/device/channels": {
        *("csrc/device/kernels", "csrc/device/driver", "csrc/device/memory"),
        "csrc/device/host_proxy",
    },
    "bindings/core": set(),
    "bindings/arrays": {"bindings/core"},
    "bindings/kernels": {"bindings/core", "bindings/arrays"},
    "bindings/engine": {"bindings/core", "bindings/arrays", "bindings/kernels"},
    "bindings/calls": {"bindings/core", "bindings/arrays", "bindings/engine"},
    "bindings/device": {"bindings/core", "bindings/arrays", "bindings/kernels", "bindings/engine"},
    "bindings/xla": {"bindings/core", "bindings/engine"},
}


def included_files(text: str) -> list[str]:
    return re.findall(r'(?m)^\s*#\s*include "([^"]+)"', text)


def included_units(texts: dict[str, str]) -> dict[str, set[str]]:
    """For each unit the other units that its files include; `texts` are by name of the file."""
    units: dict[str, set[str]] = {}
    for name, text in texts.items():
        unit = name.rpartition(".")[0]
        found = units.setdefault(unit, set())
        for target in included_files(text):
            places = (f"csrc/{target}", target, f"{name.rpartition('/')[0]}/{target}")
            found |= {place.rpartition(".")[0] for place in places if place in texts}
        found.discard(unit)
    return units


def cycles_of(arrows: dict[str, set[str]]) -> list[set[str]]:
    """Groups of two or more that can all be reached from each other."""
    reach: dict[str, set[str]] = {}
    for name in arrows:
        found: set[str] = set()
        rest = [name]
        while rest:
            more = arrows.get(rest.pop(), set()) - found
            found |= more
            rest += more
        reach[name] = found
    groups = {
        frozenset(other for other in reach[name] if name in reach.get(other, set()))
        for name in arrows
    }
    return sorted(({*group} for group in groups if len(group) > 1), key=sorted)


def native_texts() -> dict[str, str]:
    paths = [p for p in files(".h", ".cpp", ".cu") if name_of(p).startswith(("csrc/", "bindings/"))]
    return {name_of(path): path.read_text() for path in paths}


def test_no_includes_form_a_cycle() -> None:
    """Not through sources either: x.h and x.cpp of one folder are one unit."""
    texts = {"a/x.h": "", "a/x.cpp": '#include "a/y.h"', "a/y.h": '#include "a/x.h"', "a/z.h": ""}
    assert cycles_of(included_units(texts)) == [{"a/x", "a/y"}]
    units = included_units(native_texts())
    assert len(units) > 150
    assert cycles_of(units) == []


#: A function outside of classes, up to the semicolon of a declaration or the brace of a definition.
FREE_FUNCTION = re.compile(
    r"(?m)^(?!using|typedef|friend|extern|static_assert|return|else)[A-Za-z\[][^\n;{}()=]*[ *&>]"
    r"(\w+)\((?:[^()]|\([^()]*\))*\)(?: noexcept)?(;| \{)"
)


def functions_of_others(texts: dict[str, str]) -> set[str]:
    """The functions that a header declares and only a source of another name defines.

    Such a header depends on that source, which no include shows.
    """
    declared: dict[str, set[str]] = {}  # by function: the units of the headers
    defined: dict[str, set[str]] = {}
    for name, text in texts.items():
        for function, end in FREE_FUNCTION.findall(re.sub(r"//.*", "", text)):
            if end == " {":
                defined.setdefault(function, set()).add(name.rpartition(".")[0])
            elif name.endswith(".h"):
                declared.setdefault(function, set()).add(name.rpartition(".")[0])
    return {
        f"{unit}: {function}"
        for function, units in declared.items()
        for unit in units - defined.get(function, units)
        # no_*.cpp: builds without a part, so that two sources define what one header declares.
        if not any("/no_" in one for one in defined[function])
    }


def test_headers_declare_what_their_own_sources_define() -> None:
    texts = {
        "a/x.h": "// int g();\nint f(int a, int b = g(0));\nint g();\nbool h(\n    int) noexcept;",
        "a/x.cpp": "int f(int a, int b) {\n  return other();\n}\n",
        "a/y.cpp": "int g() {\n}\nbool h(\n    int) noexcept {\n}\n",
        "a/z.h": "bool part();\nint undefined();",
        "a/part.cpp": "bool part() {\n",
        "a/no_part.cpp": "bool part() {\n",
    }
    assert functions_of_others(texts) == {"a/x: g", "a/x: h"}
    assert functions_of_others(native_texts()) == set()


#: A function of a class, defined outside of the class.
DEFINITION = re.compile(r"(?m)^(?!\s|return\b)(?:[\w:<>*&,\[\] ]+[ *&])?(?:\w+::)*(\w+)::~?\w+\(")


def sources_of_classes(texts: dict[str, str]) -> dict[str, set[str]]:
    """For each class, named with its folder, the sources that define functions of it."""
    sources: dict[str, set[str]] = {}
    for name, text in texts.items():
        folder, _, file = name.rpartition("/")
        if not file.endswith(".cpp") or file.startswith("no_"):  # no_*.cpp: builds without a part
            continue
        for one in DEFINITION.findall(text):
            sources.setdefault(f"{folder}: {one}", set()).add(file)
    return sources


def test_a_class_is_one_source() -> None:
    texts = {
        "a/x.cpp": "Wide::Wide(int one) : one_(one) {}\nvoid Wide::go() {\n  return Other::go();\n",
        "a/y.cpp": "std::vector<int> Wide::all() const {",
        "a/no_x.cpp": "void Wide::go() {",
        "a/y.h": "void Narrow::go() {",
    }
    assert sources_of_classes(texts) == {"a: Wide": {"x.cpp", "y.cpp"}}
    sources = sources_of_classes(native_texts())
    assert len(sources) > 50
    assert {one: found for one, found in sources.items() if len(found) > 1} == {}


def folders_above(folder: str, units: dict[str, set[str]]) -> set[str]:
    """The folders of the same layer that `folder`, with its subfolders, includes and may not."""
    layer = folder.rpartition("/")[0]
    own = [target for unit in units if unit.startswith(f"{folder}/") for target in units[unit]]
    return {
        other
        for other in FOLDERS_BELOW
        if other.startswith(f"{layer}/") and other not in FOLDERS_BELOW[folder] | {folder}
        if any(target.startswith(f"{other}/") for target in own)
    }


def test_folders_include_only_what_is_below() -> None:
    """The media do not know each other; the folders of other layers have an order."""
    texts = {"bindings/core/a.h": '#include "bindings/calls/b.h"', "bindings/calls/b.h": ""}
    assert folders_above("bindings/core", included_units(texts)) == {"bindings/calls"}
    units = included_units(native_texts())
    layers = {folder.rpartition("/")[0] for folder in FOLDERS_BELOW}
    inner = [re.match(rf"({'|'.join(layers)})/\w+(?=/)", name) for name in units]
    assert {found[0] for found in inner if found} == set(FOLDERS_BELOW)
    assert {f: above for f in FOLDERS_BELOW if (above := folders_above(f, units))} == {}


def imported(text: str) -> set[str]:
    """Modules that are imported, at the top or inside functions; type checking's apart."""
    names: set[str] = set()
    tree = ast.parse(text)
    skipped = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in names if name.startswith("pycoll")}


#: What each folder and module of pycoll may import of the others, lazily or not, bottom up.
EVERYBODY = {"errors", "types", "config", "untrusted", "foreign_words", "doors", "cores"}
IMPORTS_OF_FOLDERS: dict[str, set[str]] = {
    "errors": set(),
    "untrusted": set(),
    "cores": set(),
    "foreign_words": set(),
    "__init__": {"foreign_words"},
    "types": {"errors"},
    "config": {"errors"},
    "doors": {"config"},
    "ops": {"errors", "types", "foreign_words", "_core"},
    "schedule": {"errors"},
    "algorithms": {"errors", "schedule"},
    "plan": {"schedule"},
    "cost": {"errors", "config", "untrusted", "cores", "schedule", "algorithms", "plan"},
    "bootstrap": {"errors", "config", "untrusted", "doors", "cores"},
    "arrays": EVERYBODY | {"_core"},
    "compress": EVERYBODY | {"_core", "ops", "cost", "arrays"},
    "device": EVERYBODY | {"_core", "ops", "schedule", "plan", "arrays", "bootstrap"},
    "comm": EVERYBODY
    | {"_core", "ops", "schedule", "algorithms", "plan", "cost", "arrays", "bootstrap", "device"}
    | {"compress"},
    "gradients": EVERYBODY | {"_core", "ops", "cost", "arrays", "compress"},
    "launch": EVERYBODY | {"bootstrap"},
    "jax": EVERYBODY | {"_core", "ops", "schedule", "arrays", "comm", "compress"},
    "local_updates": EVERYBODY | {"arrays", "compress", "gradients"},
    "optim": {"foreign_words", "gradients", "local_updates"},
    "ps": EVERYBODY | {"_core", "arrays", "bootstrap", "comm"},
    "integrations": {"errors", "types", "config", "cost", "bootstrap", "comm"},
    "torch": EVERYBODY
    | {"_core", "arrays", "bootstrap", "compress", "device", "comm", "gradients", "local_updates"}
    | {"ps"},
    "torch_entry": {"torch"},
    "tools": EVERYBODY
    | {"_core", "ops", "schedule", "algorithms", "cost", "bootstrap", "arrays", "compress", "comm"}
    | {"gradients", "launch", "ps"},
    "__main__": {"tools"},
}
#: Folders that work without native code and without arrays, and modules of others that do.
PURE_FOLDERS = ("schedule", "algorithms", "plan", "cost")
PURE_MODULES = tuple(
    f"gradients/{name}.py"
    for name in (
        *("communication_plan", "points", "policies", "methods", "simulate", "search", "chooser"),
    )
)


def imported_modules(text: str) -> set[str]:
    """The modules of pycoll that a text imports, except for type checkers only."""
    found = set()
    for name in imported(text) - {"pycoll"}:
        path = ROOT / name.replace(".", "/")
        is_module = path.with_suffix(".py").is_file() or path.is_dir() or name == "pycoll._core"
        found.add(name if is_module else name.rpartition(".")[0])
    return found - {"pycoll"}


def folder_of(module: str) -> str:
    """ "comm" for pycoll.comm.world, "errors" for pycoll.errors, "" for pycoll itself."""
    return module.partition(".")[2].partition(".")[0]


def test_no_folder_imports_one_above_it() -> None:
    paths = sorted((ROOT / "pycoll").rglob("*.py"))
    folders_of = {path: path.relative_to(ROOT).with_suffix("").parts[1] for path in paths}
    assert set(folders_of.values()) == set(IMPORTS_OF_FOLDERS)
    below = {"_core"}
    for folder, allowed in IMPORTS_OF_FOLDERS.items():
        assert allowed <= below, f"{folder} may import what is above it"
        below.add(folder)
    found = {}
    for path, folder in folders_of.items():
        imports = {folder_of(name) for name in imported_modules(path.read_text())}
        if above := imports - IMPORTS_OF_FOLDERS[folder] - {folder}:
            found[name_of(path)] = above
    assert found == {}


def import_cycles(imports: dict[str, set[str]]) -> set[str]:
    """The modules that can be reached from themselves."""
    reach = {name: set(names) for name, names in imports.items()}
    for through, further in reach.items():
        for others in reach.values():
            if through in others:
                others.update(further)
    return {name for name, names in reach.items() if name in names}


def test_no_imports_form_a_cycle() -> None:
    """Lazy imports included."""
    assert import_cycles({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == {"b", "c"}
    imports = {}
    for path in (ROOT / "pycoll").rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts).removesuffix(".__init__")
        imports[name] = imported_modules(path.read_text()) - {name}
    assert len(imports) > 100
    assert import_cycles(imports) == set()


def test_pure_folders_need_no_native_code() -> None:
    root = ROOT / "pycoll"
    paths = [path for folder in PURE_FOLDERS for path in (root / folder).glob("*.py")]
    paths += [root / name for name in PURE_MODULES]
    for path in paths:
        names = imported(path.read_text())
        assert not any(name.startswith("pycoll._core") for name in names), path
        assert "import numpy" not in path.read_text(), path


#: Folders that hold more than 20 files, each with the reason.
LARGE_FOLDERS = {
    "docs/decisions": "a file for each decision",
    "bench": "a script for each question, with what it starts",
    "tests/fuzz/corpus/frame": "a file for each seed of a fuzzer",
    "tests/fuzz/corpus/mailbox": "a file for each seed of a fuzzer",
    "tests/fuzz/corpus/plan": "a file for each seed of a fuzzer",
}


def project_files() -> list[Path]:
    """The files of the checkout, without those that git ignores."""
    git = ("git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    done = subprocess.run(git, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"this is no checkout of git: {done.stderr.strip()}")
    return sorted({path for name in done.stdout.split("\0") if (path := ROOT / name).is_file()})


def test_folders_hold_at_most_20_files() -> None:
    counts = Counter(name_of(path.parent) for path in project_files())
    assert counts["pycoll/comm"] > 10 and counts["tests/comm"] > 10 and counts["docs"] > 10
    large = {folder for folder, count in counts.items() if count > 20}
    assert large == set(LARGE_FOLDERS), "split by concept; take folders that are small off the list"


#: Folders whose tests lie in a folder of another name.
TESTED_ELSEWHERE = {
    "pycoll/device": "tests/gpu",  # named after the hardware and `make gpu-check`
    "pycoll/optim": "tests/gradients",  # it only passes on names of gradients and local_updates
}


def test_every_folder_of_code_has_a_folder_of_tests() -> None:
    """Those right below pycoll and csrc; subfolders may share it."""
    expected = {}
    for code, tests in (("pycoll", "tests"), ("csrc", "tests/cpp")):
        found = {path.relative_to(ROOT).parts for path in files(*CODE)}
        names = {parts[1] for parts in found if parts[0] == code and len(parts) > 2}
        expected |= {f"{code}/{name}": f"{tests}/{name}" for name in names}
    assert len(expected) > 20 and set(TESTED_ELSEWHERE) <= set(expected)
    lacking = {code for code, tests in expected.items() if not (ROOT / tests).is_dir()}
    assert lacking == set(TESTED_ELSEWHERE)
    for tests in TESTED_ELSEWHERE.values():
        assert list((ROOT / tests).glob("test_*.py")), tests


# Words

LEFTOVERS = re.compile(
    r"\b(TODO|FIXME|XXX|HACK|NotImplemented(Error)?|breakpoint|set_trace)\b|not implemented|"
    r"\bimport pdb\b|std::cerr|std::cout"
)
#: What would switch a sanitizer or a checker off. Lines that explain why are part of the entry.
SILENCERS = re.compile(r"suppressions?=|no_sanitize|NOLINT|__tsan_ignore|detect_leaks=0|\.supp\b")
SILENCED = {
    # The counter stands in for malloc itself, before the sanitizers' runtimes are up.
    "tests/cpp/support/allocations.h": "no_sanitize",
}
#: The name belongs to somebody else there.
FOREIGN_INSTALL = re.compile(r"pip3? install (-\S+ )*['\"]?pycoll(?!-comm)\b")


#: Words of an earlier private language, each with the field's word that took its place. They are
#: found in any case and inside identifiers. "land" is also the name of the logical reduction.
#: Others have ordinary meanings everywhere and are not looked for: offer, place, ticket, carried,
#: claim, choice, machine, values, agreement, member, door.
OLD_WORDS = {
    r"rooms?": "slot buffer, space",
    r"lend(s|able|ing|er)?|lent": "expose, zero-copy read",
    r"lands|landed|landing": "direct write",
    r"sweeps?|to and fro": "traversal, range of sizes",
    r"carrier|carried by": "host proxy",
    r"beside": "next to, in addition to, on the device stream",
    r"crowd(ed|ing)": "oversubscribed",
    r"settled": "ready, decided",
    r"awaited": "deferred, expected",
    r"agenda": "communication plan",
    r"hubs?|door ?keeper": "local rendezvous, admission",
    r"roster": "elastic rendezvous",
    r"drafts?": "row builder, notice",
    r"parts of (a|the|this) communicator": "sub-communicators",
    r"misleads": "aliases_4k",
    r"claim and copy": "prefetch and copy",
    r"signs? of (?:life|loss)": "heartbeats, loss detection",
}
#: Old names whose words are ordinary English with other meanings: a rank's pace, a flat array, a
#: value that is held, JAX's coordinator. They are found as whole names, in this case only.
OLD_NAMES = {
    r"Pace|Company|Spread": "WaitStrategy, WaitingThreads, CpuBalancer",
    r"Held": "StoredValue",
    r"Reading|Remembered|Flat|Prepared": "ParsedCall, CallCache, ContiguousView, CompiledCall",
    r"Overlap|OverlappedWrapped": "DeferredSteps",
    r"FusedMessage|GradientMessage": "FusedBatch, GradientBucket",
    r"(moving|reducing|turns)\.py": "data_movement, reductions, oversubscription",
    r"own_part|Turn": "CopyStrategy, ChannelTicket",
    r"Coordinator": "Controller",
    r"ShownArray|ReusedMemory": "CopyOnWriteArray, BufferPool",
}
#: Names that keep an old word: settings of earlier editions, which still work, and a variable of
#: Hugging Face.
KEPT_NAMES = (*RENAMED, "HF_HUB_OFFLINE")
#: Texts, each with the old words that must be found in it.
SHOWN_WORDS = {
    "what is lent in a crowded room": ["lent", "crowded", "room"],
    "_AT_HUB = kRoom + roomOf(LENT_BYTES)": ["HUB", "Room", "room", "LENT"],
    "TCPSweep settled_at SETTLED2": ["Sweep", "settled"],
    "Held.turn of a flat PYCOLL_ROSTER": ["Held"],
    "Overlap of moving.py drafts an overlap": ["Overlap", "moving.py", "drafts"],
    "the parts of the communicator, to and fro": ["parts of the communicator", "to and fro"],
}
#: Tables of this file that hold old words.
WORD_TABLES = re.compile(r"(?ms)^(OLD_WORDS|OLD_NAMES|SHOWN_WORDS) = \{$.*?^\}$")
_WORD_ENDS = re.compile(r"_|(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")


def words_found(pattern: re.Pattern[str], text: str) -> list[str]:
    return [match[0] for match in pattern.finditer(text)]


def old_words(text: str) -> list[str]:
    for name in KEPT_NAMES:
        text = text.replace(name, "")
    names = re.compile("|".join(rf"\b({old})\b" for old in OLD_NAMES))
    words = re.compile("|".join(rf"\b({old})\b" for old in OLD_WORDS), re.IGNORECASE)
    return words_found(names, text) + words_found(words, _WORD_ENDS.sub(" ", text))


def test_old_words_occur_nowhere() -> None:
    assert {text: old_words(text) for text in SHOWN_WORDS} == SHOWN_WORDS
    own = [path for path in files(*CODE, ".cu", ".pyi", ".sh") if not is_mine(path)]
    pages = [path for path in documents() if path.name != "CHANGELOG.md"]
    pages += sorted((ROOT / "docs").rglob("*.md"))
    assert all_findings(old_words, [*own, *pages]) == []
    mine, tables = WORD_TABLES.subn("", Path(__file__).read_text())
    assert tables == 3 and old_words(mine) == []


RIDDLE = re.compile(
    r"(?:^|[.;:] )(Who|What|Whoever|Whatever|Whose) (?!is (?:a|an|the)\b)[a-z][^?\n]*$"
)


def riddles(text: str) -> list[str]:
    """Sentences of comments and prose whose subject is a riddle."""
    lines = re.findall(r"(?m)(?:#:? |//+ |\"\"\")(.*)$", text)
    return [line for line in lines if RIDDLE.search(line)]


def test_sentences_name_their_subject() -> None:
    assert riddles("# Who reads it gives it back.") == ["Who reads it gives it back."]
    assert riddles("# The receiver releases the slot.") == []
    own = [path for path in files(*CODE, ".cu") if name_of(path).split("/")[0] != "tests"]
    assert all_findings(riddles, own) == []


def test_nothing_unfinished_is_left() -> None:
    assert words_found(LEFTOVERS, "x = 1  # TODO: more")
    paths = [path for path in files(*CODE, ".sh", ".md") if not is_mine(path)]
    assert all_findings(lambda text: words_found(LEFTOVERS, text), paths) == []


def test_no_sanitizer_is_switched_off() -> None:
    assert words_found(SILENCERS, "TSAN_OPTIONS=suppressions=tsan.supp")
    paths = [p for p in files(*CODE, ".sh", ".txt") if not is_mine(p)] + [ROOT / "CMakeLists.txt"]
    found = {name_of(p): set(words_found(SILENCERS, p.read_text())) for p in paths}
    assert {name: words for name, words in found.items() if words} == {
        name: {word} for name, word in SILENCED.items()
    }
    assert files(".supp") == []


def test_nobody_is_sent_to_the_index() -> None:
    for text in ("pip install pycoll", "pip install -U 'pycoll[demo]'"):
        assert words_found(FOREIGN_INSTALL, text)
    assert not words_found(FOREIGN_INSTALL, "pip install pycoll-comm")
    paths = [p for p in [*files(*CODE, ".sh"), *documents()] if not is_mine(p)]
    assert all_findings(lambda text: words_found(FOREIGN_INSTALL, text), paths) == []


# Comments and docstrings

#: Packages whose docstring maps the modules of another one.
MAPPED_ELSEWHERE = {"pycoll/optim": "pycoll/gradients"}


def mapped_modules(docstring: str) -> tuple[set[str], bool]:
    """The names in the first column of a docstring's maps, and whether the map is complete."""
    names = re.findall(r"(?m)^ *([a-z][a-z0-9_]*) {2,}[^-\s]", docstring)
    return set(names), "The modules, bottom up:\n" in docstring


def test_maps_in_docstrings_name_the_modules_of_the_folder() -> None:
    told = "The modules, bottom up:\n\n    codec       base\n    a_b   none\n  (any)  --> x\n"
    assert mapped_modules(told) == ({"codec", "a_b"}, True)
    complete = 0
    for path in sorted((ROOT / "pycoll").rglob("__init__.py")):
        folder = name_of(path.parent)
        of = ROOT / MAPPED_ELSEWHERE.get(folder, folder)
        modules = {
            p.stem for p in of.iterdir() if p.suffix == ".py" or (p / "__init__.py").exists()
        }
        names, is_complete = mapped_modules(ast.get_docstring(ast.parse(path.read_text())) or "")
        assert names <= modules, f"{folder} maps {names - modules}, which are not there"
        if is_complete:
            assert names == modules - {"__init__"}, f"{folder} maps not all of its modules"
        complete += is_complete
    assert complete > 2


def comment_share(text: str) -> float:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return sum("//" in line for line in lines) / len(lines)


def test_headers_are_contracts() -> None:
    headers = [path for path in files(".h") if path.relative_to(ROOT).parts[0] == "csrc"]
    shares = {name_of(path): comment_share(path.read_text()) for path in headers}
    assert sum(shares.values()) / len(shares) >= COMMENT_SHARE
    assert [name for name in shares if "#pragma once" not in (ROOT / name).read_text()] == []
    silent = [p for p in headers if not re.match(r"// .|#pragma once\n\n// ", p.read_text())]
    assert silent == [], "a header begins by saying what it is for"


@pytest.mark.parametrize("name", pycoll.__all__)
def test_public_names_are_explained(name: str) -> None:
    thing = getattr(pycoll, name)
    assert (thing.__doc__ or "").strip(), name
    if isinstance(thing, type):
        for word, member in vars(thing).items():
            if callable(member) and not word.startswith("_"):
                assert (member.__doc__ or "").strip(), f"{name}.{word}"


# Files that serve something


def test_headers_are_included_and_helpers_imported() -> None:
    texts = {path: path.read_text() for path in files(*CODE)}
    included = {t.split("/")[-1] for s in texts.values() for t in re.findall(r'include "(.+)"', s)}
    assert [name_of(p) for p in texts if p.suffix == ".h" and p.name not in included] == []
    words = "\n".join(texts.values())
    helpers = [
        path
        for path in texts
        if name_of(path).startswith("tests/") and path.suffix == ".py"
        if not path.name.startswith(("test_", "conftest", "make_", "check_"))
    ]
    unused = [
        name_of(path)
        for path in helpers
        if not re.search(rf'(import|from) {path.stem}\b|"{path.stem}"', words)
    ]
    assert unused == []


def test_modules_of_tests_have_names_of_their_own() -> None:
    """They are imported by their bare names, since the folders of tests are no packages."""
    stems = [p.stem for p in files(".py") if name_of(p).startswith("tests/")]
    twice = {stem for stem in stems if stems.count(stem) > 1}
    assert twice <= {"conftest"}
    assert not list((ROOT / "tests").rglob("__init__.py"))


# Skips


def silent_skips(text: str) -> Iterator[str]:
    """Skips that say no reason; that of importorskip itself does not tell how to get the module."""
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func).rpartition(".")[2]
        words = {word.arg for word in node.keywords}
        if name in ("importorskip", "skipif") and "reason" not in words:
            yield f"line {node.lineno}: {name} without a reason"
        elif name == "skip" and not node.args and "reason" not in words:
            yield f"line {node.lineno}: skip without a reason"


def test_no_skip_is_silent() -> None:
    assert list(silent_skips('pytest.importorskip("torch")\npytest.skip()')) == [
        "line 1: importorskip without a reason",
        "line 2: skip without a reason",
    ]
    assert not list(silent_skips('pytest.importorskip("torch", reason="pip install torch")'))
    tests = [path for path in files(".py") if name_of(path).startswith("tests/")]
    assert all_findings(silent_skips, tests) == []
