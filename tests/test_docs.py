"""The documents do what they say: examples run, commands, options, variables, files exist."""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import world_in_threads

import pycoll
from pycoll.config import RENAMED, SETTINGS
from pycoll.optim import POLICIES
from pycoll.plan.plan_format import ROW
from pycoll.schedule.language import FAN_MAX
from pycoll.tools.cli import main

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
DOCUMENTS = {
    path: path.read_text()
    for pattern in ("*.md", "bench/**/*.md", "tests/*.md", "docs/**/*.md", "csrc/**/*.md")
    for path in ROOT.glob(pattern)
}
PYCOLL = (sys.executable, "-m", "pycoll")


def run(*words: str, cwd: Path | None = None, statuses: tuple[int, ...] = (0,)) -> str:
    """What the command prints; it must end with one of the statuses."""
    env = {name: v for name, v in os.environ.items() if not name.startswith("PYCOLL_")}
    # What tune finds while tests run is not to be what this machine's jobs choose by.
    env["XDG_CACHE_HOME"] = str(cwd or ROOT / "build")
    done = subprocess.run(
        words, capture_output=True, text=True, timeout=200, env=env, cwd=cwd, check=False
    )
    assert done.returncode in statuses, done.stdout + done.stderr
    return done.stdout


def blocks(language: str, text: str = README) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, re.S)


def quoted(text: str) -> list[str]:
    return re.findall(r"`([^`\n]+)`", text)


# README


def test_first_example_on_four_ranks(tmp_path: Path) -> None:
    program = tmp_path / "hello.py"
    program.write_text(blocks("python")[0])
    said = run(*PYCOLL, "run", "-n", "4", str(program), cwd=tmp_path)
    assert said.startswith("4 ranks, all_reduce of 3.81 MiB over 4 ranks on 1 host")


def test_first_example_alone(tmp_path: Path) -> None:
    program = tmp_path / "hello.py"
    program.write_text(blocks("python")[0])
    assert run(sys.executable, str(program), cwd=tmp_path).startswith("1 ranks, ")


def test_second_example_with_threads(tmp_path: Path) -> None:
    program = tmp_path / "threads.py"
    program.write_text(blocks("python")[1])
    assert run(sys.executable, str(program), cwd=tmp_path) == "[1 3 5] [1 3 5]\n"


def test_all_examples_are_run_here() -> None:
    assert len(blocks("python")) == 2
    assert blocks("sh") == [block for block in blocks("sh") if block.startswith("make demo")]


def test_typed_programs_may_call_what_the_examples_call(tmp_path: Path) -> None:
    """The first example, and its calls as functions of the module, under mypy --strict."""
    method = blocks("python")[0]
    assert "comm.all_reduce(x)" in method
    (tmp_path / "method.py").write_text(method)
    (tmp_path / "function.py").write_text(re.sub(r"comm\.(\w+\()", r"pycoll.\1", method))
    (tmp_path / "wrong.py").write_text("import pycoll\npycoll.all_reduce(1, opp='max')\n")
    env = {**os.environ, "MYPYPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "method.py", "function.py", "wrong.py"],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    found = re.findall(r"^.*: error: .*", done.stdout, re.M)
    assert found and all(one.startswith("wrong.py:2: error") for one in found), done.stdout
    assert '"opp"' in found[0]


def told_commands() -> list[str]:
    rows = [line for line in README.splitlines() if line.startswith("| `pycoll")]
    return [quoted(row)[0] for row in rows]


def test_every_command_is_in_the_table() -> None:
    assert {line.split()[1] for line in told_commands()} == set(main.commands)
    overview = run(*PYCOLL, "--help")
    for name in main.commands:
        assert re.search(rf"^  {name}  ", overview, re.M), overview


def test_commands_of_the_table_run(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import pycoll\npycoll.init().barrier()\n")
    (tmp_path / "t.json").write_text('[\n{"name": "end", "ph": "i", "pid": 0, "ts": 1}\n]\n')
    for line in told_commands():
        short = line.replace("64M", "4K").replace("pycoll tune", "pycoll tune --quick")
        words = shlex.split(short)
        # The doctor's status says whether something is wrong with this machine.
        said = run(*PYCOLL, *words[1:], cwd=tmp_path, statuses=(0, words[1] == "doctor"))
        assert said or words[1] == "run", line
    assert (tmp_path / "out.png").stat().st_size > 10_000


@pytest.mark.parametrize("name", sorted(main.commands))
def test_help_fits_a_terminal(name: str) -> None:
    text = run(*PYCOLL, name, "--help")
    assert all(len(line) <= 80 for line in text.splitlines())
    for parameter in main.commands[name].params:
        for flag in parameter.opts if parameter.param_type_name == "option" else []:
            assert flag in text
            assert getattr(parameter, "help", "") or flag in ("--version",), flag


def test_explain_and_info() -> None:
    said = run(*PYCOLL, "explain", "all_reduce", "--size", "8", "--hosts", "2", "--rank", "3")
    assert "all_reduce of 1 MiB over 8 ranks on 2 hosts" in said
    assert "all_reduce, rank 3 of 8" in said
    told = run(*PYCOLL, "info")
    assert "transport shm" in told
    for setting in SETTINGS:
        assert setting.variable in told


def test_the_job_of_the_demo() -> None:
    said = run(
        sys.executable, str(ROOT / "examples/train_digits.py"), "--ranks", "1", "--ranks", "4"
    )
    worst = re.search(r"the losses differ by (\S+) at most", said)
    assert worst is not None
    assert float(worst[1]) < 1e-4
    assert "4 rank(s):" in said


def test_the_methods_of_the_demo(tmp_path: Path) -> None:
    picture = tmp_path / "step.svg"
    said = run(sys.executable, str(ROOT / "examples/train_methods.py"), "--plot", str(picture))
    assert "the losses of MG-WFBP and WFBP-PS are equal to the bit, in 40 steps" in said
    assert "2 workers, 1 server(s)" in said
    assert "WFBP-PS: 3 messages" in picture.read_text()


# Scheduling


def scheduling() -> str:
    return (ROOT / "docs" / "scheduling.md").read_text()


@pytest.mark.parametrize("number", range(len(blocks("python", scheduling()))))
def test_examples_of_scheduling(number: int, tmp_path: Path) -> None:
    program = blocks("python", scheduling())[number]
    if "torch" in program:
        pytest.importorskip("torch", reason="no torch: pip install -r tests/requirements.txt")
    (tmp_path / "program.py").write_text(program)
    if "init()" in program or "init_process_group(" in program:
        said = run(*PYCOLL, "run", "-n", "2", "program.py", cwd=tmp_path)
        assert "auto takes " in said or "explain" not in program, said
    else:
        assert run(sys.executable, "program.py", cwd=tmp_path) == blocks("text", scheduling())[0]


# Reductions


@pytest.mark.parametrize("program", blocks("python", (ROOT / "docs" / "reductions.md").read_text()))
def test_examples_of_reductions(program: str) -> None:
    def rank(comm: Any) -> None:
        exec(program, {"comm": comm, "np": np, "gradient": np.ones(3, np.float16)})

    world_in_threads(3).run(rank)


def test_example_of_calls(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "calls.md").read_text()
    (program,) = blocks("python", text)
    (tmp_path / "program.py").write_text(program)
    said = run(*PYCOLL, "run", "-n", "2", "program.py", cwd=tmp_path)
    assert said == "['rank 0', 'rank 1'] [0, 2, 4, 6]\n"
    for row in re.findall(r"^\| (`.*?) \|", text, re.M):
        for call in quoted(row):
            assert hasattr(pycoll, call.partition("(")[0].rstrip("=")) or "=" in call, call


def test_the_survey_s_methods_and_our_policies_are_all_named() -> None:
    rows = re.findall(r"^\| ([^|]+?) \|", scheduling(), re.M)
    assert {row.partition(" ")[0] for row in rows if row.startswith(METHODS)} == set(METHODS)
    assert all(f"`{name}`" in scheduling() for name in POLICIES)


METHODS = (
    *("BSP-A2A", "WFBP-A2A", "MG-WFBP", "ByteScheduler-A2A"),
    *("BSP-PS", "WFBP-PS", "ByteScheduler-PS"),
)


def test_variables_of_horovod_are_listed_with_their_meanings() -> None:
    pytest.importorskip("torch", reason="no torch: pip install -r tests/requirements.txt")
    from pycoll.torch.horovod.variables import VARIABLES

    for name, one in VARIABLES.items():
        assert f"| `{name}` | {one.meaning} |" in scheduling(), name


# All documents


def test_links_lead_somewhere() -> None:
    """The site's build makes the drawings; tests/test_site.py looks for those."""
    for path, text in DOCUMENTS.items():
        for target in re.findall(r"\]\(([^)#]+)\)", text):
            if "://" not in target and not target.startswith("drawings/"):
                assert (path.parent / target).exists(), f"{path.name}: {target}"


def test_the_index_of_decisions_and_the_navigation_have_every_page() -> None:
    folder = ROOT / "docs" / "decisions"
    listed = re.findall(r"^\* \[(.+)\]\((.+)\)$", (folder / "index.md").read_text(), re.M)
    headings = {
        path.name: path.read_text().partition("\n")[0].removeprefix("# ")
        for path in folder.glob("*.md")
        if path.name != "index.md"
    }
    assert len(listed) == len(headings)
    assert {page: title for title, page in listed} == headings
    navigation = (ROOT / "mkdocs.yml").read_text()
    assert [page for page in headings if f"- decisions/{page}\n" not in navigation] == []


# Limits


def test_first_documents_are_short() -> None:
    for name, lines in {"README.md": 150, "ARCHITECTURE.md": 200}.items():
        assert len((ROOT / name).read_text().splitlines()) <= lines, name


def test_documents_of_the_project_exist() -> None:
    for name in ("LICENSE", "SECURITY.md", "CHANGELOG.md", "CONTRIBUTING.md"):
        assert (ROOT / name).stat().st_size > 500, name


def test_the_walk_of_an_all_reduce_has_ten_sentences() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    walk = text.partition("in ten sentences\n")[2].partition("\n## ")[0]
    sentences = [" ".join(one.split()) for one in re.findall(r"(?ms)^\d+\. (.*?)(?=^\d|\Z)", walk)]
    assert len(sentences) == 10
    for one in sentences:
        assert one.endswith(".") and ". " not in one and len(one.split()) <= 25, one


def what_a_decision_lacks(text: str) -> list[str]:
    """Sections that a decision lacks or has in another order, and its status."""
    sections = ["Context", "Decision", "Evidence", "When to look again"]
    found = [name for name in re.findall(r"^## (.+)$", text, re.M) if name in sections]
    lacking = [] if found == sections else [f"sections {sections}"]
    has_status = re.match(r"# .+\n\n\*Status: [^*]+\.\* Area: ", text)
    return lacking if has_status else [*lacking, "a status and an area below its heading"]


def test_decisions_have_a_status_and_all_sections() -> None:
    """Another test finds each of them in the index."""
    whole = "# A\n\n*Status: accepted.* Area: b.\n\n## Context\n\n## Decision\n\n## Evidence\n"
    assert what_a_decision_lacks(whole + "\n## When to look again\n") == []
    assert len(what_a_decision_lacks(whole.replace("Status", "State"))) == 2
    pages = [path for path in (ROOT / "docs" / "decisions").glob("*.md") if path.stem != "index"]
    found = {path.name: what_a_decision_lacks(path.read_text()) for path in pages}
    assert len(found) > 50
    assert {name: lacks for name, lacks in found.items() if lacks} == {}


def what_an_origin_lacks(text: str) -> list[str]:
    """What the first paragraph of a page of results does not say."""
    first = text.partition("\n\n")[2].partition("\n\n")[0]
    wanted = {
        "the machine": r"\b(?:EPYC|Xeon|H100|H200)\b|^No machine:",
        "the date": r"\b20\d\d-\d\d-\d\d\b",
        "the commit": r"\bcommits? (?:from before )?[0-9a-f]{7,}\b",
    }
    return [what for what, pattern in wanted.items() if not re.search(pattern, first)]


def test_pages_of_results_begin_with_machine_date_and_commit() -> None:
    assert what_an_origin_lacks("# A\n\nAMD EPYC, 2026-11-28, commit beed227.\n") == []
    assert len(what_an_origin_lacks("# A\n\nAMD, 28 November, an earlier commit.\n")) == 3
    found = {}
    for path in (ROOT / "docs" / "results").glob("*.md"):
        text = path.read_text()
        if shown := re.match(r"<!-- file (\S+) -->", text):
            text = (ROOT / shown[1]).read_text()
        if path.name != "index.md" and (lacks := what_an_origin_lacks(text)):
            found[path.name] = lacks
    assert found == {}


def wide_cells(text: str) -> list[str]:
    """Cells of tables with more than 200 characters."""
    rows = [line.strip(" |") for line in text.splitlines() if line.lstrip().startswith("|")]
    cells = [cell.strip() for row in rows for cell in re.split(r"(?<!\\)\|", row)]
    return [cell for cell in cells if len(cell) > 200]


def test_cells_of_tables_are_short() -> None:
    assert wide_cells("| a | " + "x" * 201 + " |") and not wide_cells("| a | " + "x" * 200 + " |")
    found = {path.name: wide_cells(text) for path, text in DOCUMENTS.items()}
    assert {name: cells for name, cells in found.items() if cells} == {}


def test_every_picture_is_shown() -> None:
    shown = {
        (path.parent / target).resolve()
        for path, text in DOCUMENTS.items()
        for target in re.findall(r"!\[[^\]]*\]\(([^)\s]+)", text)
    }
    pictures = [
        path
        for folder in ("docs", "bench")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".svg", ".png", ".jpg", ".gif")
    ]
    assert len(pictures) > 5
    assert [str(path.relative_to(ROOT)) for path in pictures if path not in shown] == []


def wide_prose(text: str) -> list[str]:
    """Lines of more than 100 columns. Tables, code and entries that are one link are free."""
    lines = re.sub(r"^ *```.*?^ *```$", "", text, flags=re.S | re.M).splitlines()
    free = re.compile(r"\||\s*(?:[*] )?\[.*\]\([^)]*\)[.,]?$|    ")
    return [line for line in lines if len(line) > 100 and not free.match(line)]


def test_prose_fits_100_columns() -> None:
    assert wide_prose("x " * 51) and wide_prose("* " + "x" * 99)
    assert not wide_prose("| " + "x" * 100) and not wide_prose("* [" + "x" * 99 + "](y.md)")
    assert {
        path.name: found for path, text in DOCUMENTS.items() if (found := wide_prose(text))
    } == {}


def test_variables_exist() -> None:
    known = {setting.variable for setting in SETTINGS} | set(RENAMED)
    builds = (ROOT / "CMakeLists.txt", *ROOT.glob("csrc/**/*.cmake"))
    options = {word for path in builds for word in re.findall(r"PYCOLL_\w+", path.read_text())}
    for path, text in DOCUMENTS.items():
        named = set(re.findall(r"PYCOLL_[A-Z_]*[A-Z]", text))
        assert named <= known | options, f"{path.name}: {named - known - options}"


def test_rows_are_as_the_format_has_them() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    told = re.search(r"rows of (\d+) bytes", text)
    assert told is not None and int(told[1]) == ROW.size
    told = re.search(r"wait for up to (\d+) segments.*?send to up to (\d+) peers", text)
    assert told is not None
    assert [int(number) for number in told.groups()] == [FAN_MAX, FAN_MAX]


def made_doors(text: str) -> int:
    calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    return sum(ast.unparse(call.func).rpartition(".")[2] == "Door" for call in calls)


def test_every_door_has_a_row() -> None:
    """A feature that reaches into another library is told to users, by its module."""
    assert made_doors("A = Door(1)\n\ndef f():\n    return doors.Door(2)\n\nclass Door: ...\n") == 2
    text = (ROOT / "docs" / "process-wide.md").read_text()
    table = text.partition("| feature | door | tested with |")[2].partition("\n\n")[0]
    modules = [quoted(row)[0] for row in re.findall(r"^\| [^|]+ \| (`[^|]+) \|", table, re.M)]
    folder = ROOT / "pycoll"
    gone = [one for one in modules if not any((at / one).is_file() for at in (folder, ROOT))]
    assert gone == []
    doors = {
        str(path.relative_to(folder)): count
        for path in folder.rglob("*.py")
        if (count := made_doors(path.read_text()))
    }
    assert len(doors) > 5
    assert {name: count for name, count in doors.items() if modules.count(name) != count} == {}


def test_targets_of_make_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for path, text in DOCUMENTS.items():
        shown = "\n".join([*quoted(text), *re.findall(r"```sh\n(.*?)```", text, re.S)])
        for target in re.findall(r"^(?:[A-Z_]+=\d+ )?make ([a-z-]+)", shown, re.M):
            assert re.search(rf"^{target}:", makefile, re.M), f"{path.name}: make {target}"


def native_members(name: str, texts: list[str]) -> str:
    """The code of the types and namespaces of a name, without comments; "" if none has it."""
    kind = r"(?:class|struct|union|enum|enum class|(?:inline )?namespace)"
    attributes = r"(?:\[\[\w+\]\] |alignas\([^)]*\) )*(?:\w+::)*"
    block = re.compile(rf"^( *){kind} {attributes}{name}\b[^;{{]*{{(.*?)^\1}}", re.M | re.S)
    bodies = [found[2] for text in texts for found in block.finditer(text)]
    return re.sub(r"//.*", "", "\n".join(bodies))


def test_members_of_native_code_that_are_named_exist() -> None:
    folders = ("csrc", "bindings")
    texts = [p.read_text() for folder in folders for p in (ROOT / folder).rglob("*.h")]
    assert "may_begin" in native_members("Collectives", texts)
    assert "may_begin" not in native_members("Engine", texts)
    named = {
        (path.name, owner, member)
        for path, text in DOCUMENTS.items()
        for owner, member in re.findall(r"(?<![.\w:/])([A-Za-z_]\w*)::~?([A-Za-z_]\w*)", text)
    }
    assert len(named) > 10, "the names were not found"
    gone = [
        f"{page}: {owner}::{member}"
        for page, owner, member in sorted(named)
        if owner != "std" and not re.search(rf"\b{member}\b", native_members(owner, texts))
    ]
    assert gone == []


def test_files_that_are_named_exist() -> None:
    folders = "csrc|bindings|pycoll|tests|bench|docs|examples"
    for path, text in DOCUMENTS.items():
        for word in quoted(text):
            if re.fullmatch(rf"({folders})(/[\w.]+)+/?", word):
                assert (ROOT / word).exists() or (ROOT / f"{word}.py").exists(), (path.name, word)
