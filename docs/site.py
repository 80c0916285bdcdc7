"""Pages that are made of the source when the site is built, so that each truth stands once.

The home page is the README, a method's page gets its options, messages and recipes, the API page is
made of signatures and docstrings, the glossary is that of the architecture page, and files that
pages link to outside of docs/ become pages. Run by `mkdocs build`, see mkdocs.yml.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

DOCS = Path(__file__).parent
ROOT = DOCS.parent
LINK = re.compile(r"\]\((?!https?://|#|mailto:)([^)#\s]+)(#[^)\s]*)?\)")
WIDEST = 80  # letters of a signature on one line
LANGUAGES = {".py": "python", ".toml": "toml"}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """The list of methods, and pages that the navigation does not name."""
    from fedstill.methods import METHODS

    named = str(config.nav)
    for entry in config.nav or []:
        if entry.get("Methods") is not None:
            entry["Methods"] = [{name: f"methods/{name}.md"} for name in METHODS]
    pages = sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))
    others = [page for page in pages if page not in named and not page.startswith("methods/")]
    assert config.nav is not None
    for entry in config.nav:
        if "Reference" in entry:
            entry["Reference"] += others
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are not written by hand."""
    made = {
        "index.md": _home(),
        "api.md": api(),
        "glossary.md": glossary(),
        **{f"recipe-files/{folder.name}.md": _recipes(folder) for folder in _recipe_folders()},
    }
    for path in sorted(_linked_outside()):
        made[_page_of(path)] = _file_page(path)
    for place, text in made.items():
        files.append(File.generated(config, place, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links out of docs/ go to the pages made of those files; methods get their tables."""
    place = page.file.src_uri
    if place.startswith("methods/"):
        markdown = f"{markdown.rstrip()}\n\n{method_tables(Path(place).stem)}"
    return LINK.sub(lambda found: _inside(found, place), markdown)


def _inside(found: re.Match[str], place: str) -> str:
    """A link as it is, or to the page made of a file outside of docs/."""
    target, anchor = found[1], found[2] or ""
    path = (DOCS / place).parent / target
    resolved = Path(os.path.normpath(path))
    if resolved.is_relative_to(DOCS) or not resolved.exists():
        return found[0]
    page = _page_of(resolved.relative_to(ROOT))
    return f"]({os.path.relpath(page, Path(place).parent)}{anchor})"


@cache
def _linked_outside() -> frozenset[Path]:
    """The files of the repository that pages link to."""
    found = set()
    texts = {page: page.read_text(encoding="utf-8") for page in DOCS.rglob("*.md")}
    texts[DOCS / "index.md"] = _home()
    for page, text in texts.items():
        for match in LINK.finditer(text):
            path = Path(os.path.normpath(page.parent / match[1]))
            if path.is_file() and not path.is_relative_to(DOCS) and path.is_relative_to(ROOT):
                found.add(path.relative_to(ROOT))
    return frozenset(found)


def _page_of(path: Path) -> str:
    return f"repository/{path.as_posix().replace('/', '-')}.md"


def _file_page(path: Path) -> str:
    text = (ROOT / path).read_text(encoding="utf-8")
    if path.name == "CHANGELOG.md":
        return LINK.sub(lambda found: f"](../{found[1].removeprefix('docs/')})", text)
    if path.suffix == ".ipynb":
        return f"# {path.name}\n\n{_notebook(ROOT / path)}"
    return f"# {path}\n\n````{LANGUAGES.get(path.suffix, 'text')}\n{text.rstrip()}\n````\n"


def _notebook(path: Path) -> str:
    parts = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        text = "".join(cell["source"])
        parts.append(text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```")
    return "\n\n".join(parts)


def _home() -> str:
    """The README, whose links start in docs/ here."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")

    def link(found: re.Match[str]) -> str:
        target, anchor = found[1], found[2] or ""
        inside = target.removeprefix("docs/") if target.startswith("docs/") else f"../{target}"
        if (ROOT / target).is_dir():  # a folder has no page of its own
            inside = "methods/fedavg.md" if target.rstrip("/") == "docs/methods" else "recipes.md"
        return f"]({inside}{anchor})"

    return LINK.sub(link, text)


def glossary() -> str:
    """The architecture page's list of words."""
    text = (DOCS / "architecture.md").read_text(encoding="utf-8")
    section = text.split("\n## Glossary\n", 1)[1].split("\n## ", 1)[0]
    return f"# Glossary\n{section}"


def api() -> str:
    """Every name of `import fedstill`, with its signature and docstring."""
    import fedstill

    parts = [
        "# API",
        "",
        "Every name that `import fedstill` gives. How they go together: [in Python](python.md).",
    ]
    for name in fedstill.__all__:
        value = getattr(fedstill, name)
        if not (inspect.isclass(value) or inspect.isfunction(value)):
            continue
        parts += ["", f"## {name}", "", "```python", _signature(name, value), "```", ""]
        parts.append(_prose(inspect.getdoc(value) or ""))
        if inspect.isclass(value):
            parts += _members(value)
    return "\n".join(parts) + "\n"


class _Hint:
    """A hint that is shown as it stands in the source, without the quotes of a string."""

    def __init__(self, hint: Any):
        self.text = hint if isinstance(hint, str) else inspect.formatannotation(hint)

    def __repr__(self) -> str:
        return self.text


def _signature(name: str, value: Any) -> str:
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return name
    hinted = [
        parameter
        if parameter.annotation is parameter.empty
        else parameter.replace(annotation=_Hint(parameter.annotation))
        for parameter in signature.parameters.values()
    ]
    returned = signature.return_annotation
    ending = "" if returned in (signature.empty, None, "None") else f" -> {_Hint(returned)}"
    parts = str(signature.replace(parameters=hinted, return_annotation=signature.empty))[1:-1]
    parts = re.sub(r"<[^<>]*>", "…", parts)
    whole = f"{name}({parts}){ending}"
    if len(whole) <= WIDEST:
        return whole
    lines = "".join(f"    {part},\n" for part in _at_commas(parts))
    return f"{name}(\n{lines}){ending}"


def _at_commas(text: str) -> list[str]:
    """The parts of a list of parameters, whose hints and defaults may hold commas themselves."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts]


def _members(kind: type) -> list[str]:
    """The methods and properties that a class has itself and says something about."""
    rows = []
    for name, value in vars(kind).items():
        function = value.fget if isinstance(value, property) else value
        text = inspect.getdoc(function) if callable(function) else None
        if name.startswith("_") or not text or inspect.isclass(function):
            continue
        call = "" if isinstance(value, property) else "()"
        rows.append(f"- `{name}{call}`: {_plain(text.splitlines()[0])}")
    return ["", *rows] if rows else []


def _prose(text: str) -> str:
    """A docstring as Markdown; indented lines are code already."""
    return "\n".join(line if line.startswith("    ") else _plain(line) for line in text.split("\n"))


def _plain(text: str) -> str:
    """A line in which only code between backticks is marked up."""
    words = re.split(r"(`[^`]*`)", text)
    return "".join(
        word if word.startswith("`") else word.replace("<", "&lt;").replace("[", "\\[")
        for word in words
    )


def method_tables(name: str) -> str:
    """Options, messages and recipes of a method, from its source and the recipes' files."""
    from fedstill.commands import listings
    from fedstill.commands.meanings import options_of
    from fedstill.methods import METHODS

    kind = METHODS[name]
    rows = listings.option_rows(
        [
            {"name": f"`{o.name}`", "value": o.default, "range": o.range, "meaning": o.meaning}
            for o in options_of(kind)
        ]
    )
    parts = ["## Options", "", listings.markdown(rows) if rows else "None."]
    for preset, values in kind.presets.items():
        told = ", ".join(f"`{key} = {_value(value)}`" for key, value in values.items())
        parts += ["", f"Preset `{preset}`: {told}."]
    parts += ["", "## Its steps", "", *_steps(kind), "", "## Recipes and results", ""]
    recipes = [path for path in _all_recipes() if name in _methods_in(path)]
    for path in recipes:
        parts.append(f"- [{path.parent.name}/{path.stem}]({_anchor(path)})")
    parts += [
        "",
        "Our results beside the papers': [results](../results.md). Traffic for your shapes: "
        f"`fedstill show {name} --shape 3x32x32 --classes 10`.",
    ]
    return "\n".join(parts) + "\n"


def _value(value: Any) -> str:
    return str(value) if isinstance(value, str | int | float | tuple) else type(value).__name__


def _steps(kind: Any) -> list[str]:
    """The plan: who does what when, and what is sent."""
    method = kind()
    lines = ["| when | who | step | sends | what |", "|---|---|---|---|---|"]
    plan = {"before": method.before(), "each round": method.each_round(), "after": method.after()}
    for when, steps in plan.items():
        for step in dict.fromkeys(steps):
            sends = f"`{step.sends.__name__}`" if step.sends else ""
            row = (when, step.place.value, f"`{step.name}`", sends, _plain(step.purpose))
            lines.append(f"| {' | '.join(row)} |")
    return lines


def _recipe_folders() -> list[Path]:
    return sorted(path for path in (ROOT / "recipes").iterdir() if path.is_dir())


@cache
def _all_recipes() -> tuple[Path, ...]:
    return tuple(sorted((ROOT / "recipes").rglob("*.toml")))


@cache
def _methods_in(path: Path) -> frozenset[str]:
    table = tomllib.loads(path.read_text(encoding="utf-8")).get("method", [])
    listed = table if isinstance(table, list) else [table]
    return frozenset(str(entry.get("name")) for entry in listed)


def _anchor(path: Path) -> str:
    heading = re.sub(r"[^\w\- ]", "", path.name.lower()).replace(" ", "-")
    return f"../recipe-files/{path.parent.name}.md#{heading}"


def _recipes(folder: Path) -> str:
    """All recipes of a folder on one page."""
    parts = [
        f"# Recipes: {folder.name}",
        "",
        f"Run one with `fedstill run recipes/{folder.name}/…`.",
    ]
    for path in sorted(folder.glob("*.toml")):
        text = path.read_text(encoding="utf-8").rstrip()
        parts += ["", f"## {path.name}", "", "```toml", text, "```"]
    return "\n".join(parts) + "\n"
