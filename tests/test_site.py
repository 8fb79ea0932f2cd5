"""The site is built without a warning, its links lead somewhere, and its examples run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted((ROOT / "docs").rglob("*.md"))
#: Pages whose examples other tests run, in a setting of their own; paths in docs.
ELSEWHERE = {
    *("calls.md", "reductions.md", "scheduling.md", "jax.md", "gpu.md", "guides/trainers.md"),
    *("guides/starting/ray.md", "guides/starting/dask.md", "guides/starting/spark.md"),
    *("guides/starting/jax-distributed.md", "guides/starting/launching.md"),
}


class _Links(HTMLParser):
    """The targets of a page, and the names that others can point to."""

    def __init__(self) -> None:
        super().__init__()
        self.targets: set[str] = set()
        self.names: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.names |= {value for key in ("id", "name") if (value := given.get(key))}
        self.targets |= {value for key in ("href", "src") if (value := given.get(key))}


def build(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Build the site as ``make docs`` does. With --quiet, --strict would count no warnings."""
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder), *options],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = build(folder)
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stdout + done.stderr
    return folder


def test_a_page_that_the_navigation_lacks_fails_the_build(tmp_path: Path) -> None:
    """The project's settings do so; a site of two pages takes less time than all."""
    (tmp_path / "docs").mkdir()
    for name in ("index", "forgotten"):
        (tmp_path / "docs" / f"{name}.md").write_text(f"# {name}\n")
    config = tmp_path / "mkdocs.yml"
    config.write_text(f"INHERIT: {ROOT / 'mkdocs.yml'}\nnav: [index.md]\nplugins: []\nhooks: []\n")
    done = build(tmp_path / "site", "--config-file", str(config))
    said = done.stdout + done.stderr
    assert done.returncode == 1 and "- forgotten.md" in said, said
    assert "Aborted with 1 warnings in strict mode" in said, said
    makefile = (ROOT / "Makefile").read_text()
    assert "mkdocs build --strict" in makefile and "--quiet --site" not in makefile


def test_every_link_of_the_site_leads_somewhere(site: Path) -> None:
    pages = {}
    for path in site.rglob("*.html"):
        pages[path] = _Links()
        pages[path].feed(path.read_text())
    assert len(pages) > 30
    broken = []
    for path, page in pages.items():
        for target in page.targets:
            address, anchor = urldefrag(unquote(target))
            if re.match(r"[a-z]+:|//", address) or path.name == "404.html":
                continue
            place = (path.parent / address.partition("?")[0]).resolve() if address else path
            place = place / "index.html" if place.is_dir() else place
            if not place.exists() or (
                anchor and place in pages and anchor not in pages[place].names
            ):
                broken.append(f"{path.name}: {target}")
    assert broken == []


def test_the_site_fetches_nothing(site: Path) -> None:
    """No script, style, font or picture comes from another host."""
    for path in site.rglob("*.html"):
        page = path.read_text()
        loaded = re.findall(r'<(?:script|img|link)[^>]+(?:src|href)="(https?:[^"]+)"', page)
        assert [one for one in loaded if "canonical" not in one] == [], path.name


def test_drawings_show_what_schedules_do(site: Path) -> None:
    for name in ("ring", "double_binary_tree", "hierarchy"):
        assert (site / "drawings" / f"{name}.svg").stat().st_size > 10_000


def test_shown_documents_keep_their_pictures(site: Path) -> None:
    pictures = re.findall(r"!\[.*\]\((\S+)\)", (ROOT / "bench" / "RESULTS.md").read_text())
    page = (site / "results" / "two-cores.html").read_text()
    assert pictures and all(f'src="../bench/{name}"' in page for name in pictures)
    assert all((site / "bench" / name).is_file() for name in pictures)


def _examples() -> list[tuple[str, str]]:
    assert [name for name in ELSEWHERE if not (ROOT / "docs" / name).is_file()] == []
    found = []
    for path in PAGES:
        if str(path.relative_to(ROOT / "docs")) not in ELSEWHERE:
            blocks = re.findall(r"```python\n(.*?)```", path.read_text(), re.S)
            found += [(f"{path.name}-{n}", block) for n, block in enumerate(blocks)]
    return found


@pytest.mark.parametrize("program", [pytest.param(code, id=name) for name, code in _examples()])
def test_examples_run_on_two_ranks(program: str, tmp_path: Path) -> None:
    if "torch" in program:
        pytest.importorskip("torch", reason="no torch: pip install -r tests/requirements.txt")
    (tmp_path / "program.py").write_text(program)
    done = subprocess.run(
        [sys.executable, "-m", "pycoll", "run", "-n", "2", "program.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_class_of_errors_has_its_place_in_troubleshooting() -> None:
    from pycoll import errors

    text = (ROOT / "docs" / "guides" / "troubleshooting.md").read_text()
    for name, kind in vars(errors).items():
        if (
            isinstance(kind, type)
            and issubclass(kind, Exception)
            and kind is not errors.PycollError
        ):
            assert f"## {name}\n" in text, name
