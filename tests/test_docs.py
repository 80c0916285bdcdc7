"""The documentation: the site builds without a warning, every link lives, marked blocks run."""

from __future__ import annotations

import re
import shlex
import warnings
from dataclasses import fields
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from typer.testing import CliRunner

from fedstill.commands.cli import app
from fedstill.methods import METHODS

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(
    r"^<!-- (?P<mark>runs|file (?P<file>\S+)) -->\n```(?P<kind>\w+)\n(?P<text>.*?)^```", re.M | re.S
)
PAGES = sorted(
    path for path in (ROOT / "docs").rglob("*.md") if "<!-- runs -->" in path.read_text("utf-8")
)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_blocks_marked_as_runnable_run(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": page.stem}
    for block in BLOCK.finditer(page.read_text(encoding="utf-8")):
        if block["file"]:
            Path(block["file"]).write_text(block["text"], encoding="utf-8")
        elif block["kind"] == "python":
            exec(compile(block["text"], str(page), "exec"), names)
        else:
            for line in block["text"].splitlines():
                program, *words = shlex.split(line)
                assert program == "fedstill"
                result = CliRunner().invoke(app, words)
                assert result.exit_code == 0, f"{line}: {result.output}"


WIDEST = 110
MADE = {"ledger.md"}  # by a command, a line for each cell


@pytest.mark.parametrize("page", sorted((ROOT / "docs").rglob("*.md")), ids=lambda page: page.stem)
def test_pages_are_wrapped_but_for_tables_and_code(page: Path) -> None:
    text = re.sub(r"^ *```.*?^ *```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    long = [line for line in text.splitlines() if len(line) > WIDEST and not line.startswith("|")]
    assert page.name in MADE or not long, long


@pytest.mark.parametrize("name", METHODS)
def test_the_page_of_a_method_names_its_presets(name: str) -> None:
    text = (ROOT / "docs/methods" / f"{name}.md").read_text(encoding="utf-8")
    missing = [p for p in METHODS[name].presets if f"`{p}`" not in text and f'"{p}"' not in text]
    assert set(missing) <= {"small"}, missing  # which every method has


class Links(HTMLParser):
    """Where a page leads to, what it loads, and what can be pointed at in it."""

    def __init__(self, text: str):
        super().__init__()
        self.targets: list[str] = []
        self.loaded: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        found = dict(attributes)
        self.anchors |= {value for name in ("id", "name") if (value := found.get(name))}
        if tag == "a" and found.get("href"):
            self.targets.append(str(found["href"]))
        if tag in ("script", "img", "link") and (found.get("src") or found.get("href")):
            self.loaded.append(str(found.get("src") or found.get("href")))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site as `mkdocs build --strict` makes it, which ends at the first warning."""
    pytest.importorskip("material")
    from click.testing import CliRunner as Runner  # mkdocs is made with click itself
    from mkdocs.__main__ import cli

    place = tmp_path_factory.mktemp("site")
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(action="ignore"):
        patch.chdir(ROOT)
        patch.setenv("NO_MKDOCS_2_WARNING", "1")
        done = Runner().invoke(cli, ["build", "--strict", "-d", str(place)])
    assert done.exit_code == 0, done.output
    assert not re.search(r"^(WARNING|ERROR)", done.output, re.M), done.output
    return place


def test_every_link_of_the_site_lives_and_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    pages = {path: Links(path.read_text(encoding="utf-8")) for path in site.rglob("*.html")}
    assert len(pages) > 40
    dead = []
    for path, links in pages.items():
        if path.name == "404.html":
            continue
        assert not [url for url in links.loaded if url.startswith(("http:", "https:", "//"))], path
        for url in links.targets:
            if re.match(r"[a-z]+:", url):
                continue
            place, _, anchor = unquote(url).partition("#")
            target = (path.parent / place).resolve() if place else path
            target = target / "index.html" if target.is_dir() else target
            known = pages[target].anchors if target in pages else set()
            if not target.exists() or (anchor and target in pages and anchor not in known):
                dead.append(f"{path.relative_to(site)}: {url}")
    assert dead == []


def test_the_site_tells_of_every_method_its_options_steps_and_recipes(site: Path) -> None:
    for name, kind in METHODS.items():
        text = (site / "methods" / f"{name}.html").read_text(encoding="utf-8")
        names = [field.name for field in fields(kind)]
        assert all(heading in text for heading in (">Options<", ">Its steps<")), name
        assert all(f"<code>{field}</code>" in text for field in names), name
    assert "FedDM" in (site / "api.html").read_text(encoding="utf-8")
    assert "stackable" in (site / "glossary.html").read_text(encoding="utf-8")


def test_the_page_of_names_shows_code_as_it_is_written_and_a_parameter_on_each_line(
    site: Path,
) -> None:
    page = (site / "api.html").read_text(encoding="utf-8")
    text = unescape(re.sub(r"<[^>]*>", "", page))
    assert not re.search(r"<code>[^<]*(\\\[|&amp;lt;)", page)
    assert "fedstill.compare([fedavg, feddm])" in text
    assert "\n    summary: Mapping[str, Any],\n" in text and "'Path" not in text
