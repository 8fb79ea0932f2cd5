"""Generates parts of the site: drawings of schedules, settings, command line, shown documents.

MkDocs calls the functions below. A page holds a marker in a line of its own, and the hook replaces
the line: ``<!-- settings -->``, ``<!-- command line -->``, ``<!-- file SECURITY.md -->``. The last
one shows a document that lies outside docs/; links in it lead to the site's page of their target,
and its pictures come from bench/.
"""

from __future__ import annotations

import os.path
import re
import sys
from pathlib import Path
from typing import Any

import click
from mkdocs.structure.files import File

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(ROOT)]

import drawings  # noqa: E402  # the folder is known only now

from pycoll.config import SETTINGS, Config  # noqa: E402
from pycoll.tools.cli import main  # noqa: E402


def settings() -> str:
    """Every ``PYCOLL_*`` variable with its default and its meaning, as a table."""
    defaults = Config()
    rows = ["| variable | default | meaning |", "|---|---|---|"]
    for one in SETTINGS:
        value = getattr(defaults, one.field)
        shown = "" if value is None or value in ("", ()) else f"`{value}`"
        rows.append(f"| `{one.variable}` | {shown} | {one.help.replace('|', 'or')} |")
    return "\n".join(rows)


def command_line() -> str:
    """The output of ``pycoll COMMAND --help`` for every command."""
    parts = []
    for name, command in sorted(main.commands.items()):
        context = click.Context(command, info_name=f"pycoll {name}", max_content_width=90)
        parts.append(f"## pycoll {name}\n\n```text\n{command.get_help(context)}\n```")
    return "\n\n".join(parts)


MARKERS = {"<!-- settings -->": settings, "<!-- command line -->": command_line}


#: Documents outside docs/, and the pages that show them.
SHOWN = {
    "ARCHITECTURE.md": "internals/architecture.md",
    "CONTRIBUTING.md": "internals/contributing.md",
    "SECURITY.md": "guides/security.md",
    "CHANGELOG.md": "changelog.md",
    "csrc/plan/FORMAT.md": "internals/plan-format.md",
    "csrc/transport/WIRE.md": "internals/wire.md",
    "csrc/transport/verbs/VERBS.md": "internals/verbs.md",
    "tests/README.md": "internals/tests.md",
    "bench/README.md": "internals/bench.md",
    "bench/RESULTS.md": "results/two-cores.md",
}


def shown_file(name: str, page: str) -> str:
    """The document ``name``, for the site's page ``page``."""
    folder = Path(name).parent

    def relinked(match: re.Match[str]) -> str:
        text, target = match[1], match[2]
        path, hash_sign, anchor = target.partition("#")
        if "://" in target or not path:
            return match[0]
        place = os.path.normpath(folder / path)
        if place in SHOWN:
            there = SHOWN[place]
        elif place.startswith("docs/"):
            there = place.removeprefix("docs/")
        else:
            return text
        return f"[{text}]({os.path.relpath(there, Path(page).parent)}{hash_sign}{anchor})"

    def redrawn(match: re.Match[str]) -> str:
        place = os.path.normpath(folder / match[2])
        return f"![{match[1]}]({os.path.relpath(place, Path(page).parent)})"

    text = re.sub(r"!\[([^\]]*)\]\(([^)\s]+)\)", redrawn, (ROOT / name).read_text())
    return re.sub(r"(?<!!)\[([^\]]+)\]\(([^)\s]+)\)", relinked, text)


def on_files(files: Any, config: Any) -> Any:
    """Draw the schedules, and give the drawings and the pictures of bench/ to the site."""
    folder = Path(config["site_dir"]).parent / "drawings"
    drawn = [(folder, path) for path in drawings.write_all(folder / "drawings")]
    for base, path in drawn + [(ROOT, path) for path in sorted(ROOT.glob("bench/*.svg"))]:
        name = f"{path.parent.name}/{path.name}"
        files.append(File(name, str(base), config["site_dir"], config["use_directory_urls"]))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Replace every marker of the page by the text that it names."""
    for name in re.findall(r"^<!-- file (\S+) -->$", markdown, re.M):
        text = shown_file(name, page.file.src_uri)
        markdown = markdown.replace(f"<!-- file {name} -->", text)
    for marker, make in MARKERS.items():
        if marker in markdown:
            markdown = markdown.replace(marker, make())
    return markdown
