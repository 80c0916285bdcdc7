"""What the command line lists: rows as a table, JSON or Markdown; no options, no files."""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from enum import StrEnum
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from fedstill.data import Entry
    from fedstill.report.layout import Layout

Row = dict[str, Any]


class TableForm(StrEnum):
    """How a comparison is printed."""

    table = "table"
    json = "json"
    markdown = "markdown"
    csv = "csv"
    latex = "latex"


class Form(StrEnum):
    """How a listing is printed."""

    table = "table"
    json = "json"
    markdown = "markdown"


def print_json(value: Any) -> None:
    """Plain values as JSON, on standard output."""
    from fedstill.core.files import for_json  # its package imports torch

    print(json.dumps(for_json(value), indent=2, default=str, ensure_ascii=False))


def console() -> Console:
    """A terminal as wide as it is, or eighty columns where there is none."""
    from rich.console import Console

    return Console()


def broken(text: str, indent: str = "") -> str:
    """A text whose lines end between words, none wider than the terminal; later ones indented."""
    width = console().width
    return "\n".join(
        fill(
            line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
        )
        for line in text.split("\n")
    )  # fmt: skip


def print_as(
    form: Form,
    as_json: Callable[[], Any],
    as_markdown: Callable[[], str],
    as_rich: Callable[[], RenderableType],
) -> None:
    """Something in one of its three forms, on standard output."""
    if form is Form.json:
        print_json(as_json())
    elif form is Form.markdown:
        print(as_markdown())
    else:
        console().print(as_rich())


def print_rows(rows: Sequence[Row], form: Form, names: int = 1) -> None:
    """Rows that all have the same keys, which are the names of the columns; `names` name a row."""
    print_as(form, lambda: rows, lambda: markdown(rows), lambda: table(rows, names=names))


def markdown(rows: Sequence[Row]) -> str:
    """The rows as a Markdown table."""
    from fedstill.report.layout import markdown_table

    return markdown_table(_layout(rows))


def table(rows: Sequence[Row], title: str = "", names: int = 1) -> RenderableType:
    """A table for a terminal, or several where one is too wide; nothing is cut off.

    Only the last column is ever broken into lines. Each of several begins with the first columns,
    as many as name a row.
    """
    from fedstill.report.layout import Fitting

    return Fitting(title, _layout(rows, names))


def _layout(rows: Sequence[Row], names: int = 1) -> Layout:
    """The rows as cells; whole numbers are set to the right."""
    from fedstill.report.layout import Layout

    head = list(rows[0])
    body = [[_cell(row[name]) for name in head] for row in rows]
    numbers = [place for place, name in enumerate(head) if isinstance(rows[0][name], int)]
    return Layout(head, body, numbers=numbers, sentences=True, names=names)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def method_rows(form: Form) -> list[Row]:
    """Every method with its purpose and paper; in a table the paper is author, place and year.

    What follows the first line of a method's file is a citation where it has a year or names an
    algorithm; of methods that follow no paper it is a remark.

    Where plug-ins are installed, a column says whose each method is.
    """
    from fedstill.core.names import OURS
    from fedstill.methods import METHOD_NAMES

    listed = list(METHOD_NAMES.listed())
    others = any(method.source != OURS for method in listed)
    rows = []
    for method in listed:
        row = {"method": method.name, **({"from": method.source} if others else {})}
        cited, purpose = "", f"cannot be used: {method.fault}"
        if method.fault is None:
            cited, purpose = _cited(method.value)
        whole = cited if re.search(r"\b(19|20)\d\d\b|\bAlgorithm \d", cited) else ""
        paper = short_citation(cited) if form is Form.table else whole
        rows.append({**row, "paper": paper, "purpose": purpose})
    return rows


def _cited(kind: type) -> tuple[str, str]:
    """A method's citation and purpose, as its module's docstring has them, else its own."""
    first, *rest = (sys.modules[kind.__module__].__doc__ or "").strip().split("\n")
    purpose = first.partition(": ")[2] or (inspect.getdoc(kind) or "").split("\n")[0]
    return " ".join(" ".join(rest).split()), purpose


def short_citation(citation: str) -> str:
    """`McMahan et al., AISTATS 2017` out of a whole citation; empty where there is no year."""
    authors, *sentences = citation.split(". ")
    places = [s.removesuffix(".") for s in sentences if re.search(r"\b(19|20)\d\d\.?$", s)]
    first, *others = authors.split(", ")
    who = f"{first} et al." if others[1:] else " and ".join([first, *others])
    return f"{who}, {re.sub(r'^arXiv [0-9.]+, ', '', places[0])}" if places else ""


def data_rows(data_dir: Path | None) -> list[Row]:
    """Every data set, and whether its files are in the folder."""
    from fedstill.core.names import OURS
    from fedstill.data import SET_NAMES, entry_named

    rows = []
    for listed in SET_NAMES.listed():
        if listed.fault is None:
            row = _data_row(listed.name, entry_named(listed.name), data_dir)
            rows.append(row if listed.source == OURS else {**row, "state": listed.source})
        else:
            blank = dict.fromkeys(("kind", "shape", "train / test"), "")
            told = {
                "state": listed.source,
                "missing": [],
                "what": f"cannot be used: {listed.fault}",
            }
            rows.append({"data": listed.name, **blank, **told})
    return rows


def _data_row(name: str, entry: Entry, data_dir: Path | None) -> Row:
    missing = [f for f in entry.files if data_dir is None or not (data_dir / f).exists()]
    states = {"public": "torchvision", "own": "yours"}
    return {
        "data": name,
        "kind": entry.kind,
        "shape": "x".join(map(str, entry.shape)) if entry.shape else "",
        "train / test": " / ".join(map(str, entry.counts)) if entry.counts else "",
        "state": states.get(entry.kind, "needs files" if missing else "ready"),
        "missing": missing,
        "what": entry.description,
    }


def print_data(rows: Sequence[Row], data_dir: Path | None) -> None:
    """The sets that can be used, those of torchvision below, and what is missing."""
    shown = ("data", "shape", "train / test", "state", "what")
    near = [{key: row[key] for key in shown} for row in rows if row["state"] != "torchvision"]
    far = [{key: row[key] for key in shown[:3]} for row in rows if row["state"] == "torchvision"]
    console().print(table(near))
    if data_dir is None:
        print("needs files: name their folder with --data-dir")
    for row in rows:
        if data_dir is not None and row["missing"]:
            print(f"{row['data']} needs {', '.join(row['missing'])} in {data_dir}")
    print("\nthrough torchvision, fetched only with data.options.download=true:")
    console().print(table(far))


SCORED = {
    "server": "the server's model, as average_accuracy",
    "clients": "clients' own models, as averaged_local_accuracy, averaged_global_accuracy and "
    "inter_accuracy",
    "own": "clients' own models on their own tests, as averaged_local_accuracy",
}


def print_method(found: Mapping[str, Any], form: Form) -> None:
    """A method for a reader: paper, plan, messages, memories, values."""
    example = found["example"]
    shape = "x".join(map(str, example["model"]["shape"]))
    paragraphs = [" ".join(part.split()) for part in found["paper"].split("\n\n")]
    print(broken("\n\n".join(paragraphs)) + "\n\nplan")
    print_rows(_plan(found), form)
    public = f"; everybody holds {example['public']:,} public examples" if example["public"] else ""
    print(
        broken(
            f"counted for {example['model']['name']} ({example['model_floats']:,} floats) on "
            f"{shape}, {example['classes']} classes, and a client that holds {example['held']} of "
            f"them{public}"
        )
    )
    if found["messages"]:
        print("\nmessages")
        print_rows(_travelling(found), form)
    print("\nstates, kept between steps")
    print_rows(_remembered(found), form)
    ways = [f"{count:,} {way}" for way, count in found["floats_per_round"].items() if count]
    print(f"floats per round, each message counted once: {', '.join(ways) or 'none'}")
    if apart := [said["name"] for said in found["messages"] if said["different"] > 1]:
        print(
            broken(
                f"{', '.join(apart)}: the sum of messages that differ, one for each of the "
                f"{example['clients']} clients counted here"
            )
        )
    own = f", and {SCORED['own']}" if found["scores_own"] and found["scored"] == "server" else ""
    print(broken(f"scored: {SCORED[found['scored']]}{own}"))
    if found["sends_examples"]:
        print("sends_examples: training examples are shown to others")
    print("\noptions")
    print_rows(option_rows(found["options"]), form)
    for name, changed in found["presets"].items():
        values = ", ".join(f"{key} = {_preset(value)}" for key, value in changed.items())
        print(broken(f"preset={name}: {values}", "  "))


def print_options(options: Sequence[Mapping[str, Any]], form: Form) -> None:
    """Options of a method alone."""
    if form is Form.json:
        print_json(options)
    else:
        print_rows(option_rows(options), form)


def option_rows(options: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Options as lines of a table; a value that is a method has its name."""
    return [
        {
            "option": option["name"],
            "value": _named(option["value"]),
            "range": option["range"],
            "meaning": option["meaning"],
        }
        for option in options
    ]


def _named(value: Any) -> str:
    """A value in a word: of a method, the name of its class."""
    plain = isinstance(value, str | int | float | tuple | type(None))
    return str(value) if plain else type(value).__name__


def _preset(value: Any) -> str:
    """A value of a preset; of a method, its name and what is not as by default."""
    if not is_dataclass(value) or isinstance(value, type):
        return str(value)
    changed = (
        f"{field.name}={getattr(value, field.name)!r}"
        for field in fields(value)
        if field.default is MISSING or getattr(value, field.name) != field.default
    )
    return f"{type(value).__name__}({', '.join(changed)})"


def _plan(found: Mapping[str, Any]) -> list[Row]:
    return [
        {
            "when": step["part"],
            "who": step["at"],
            "step": step["name"] + (f" x{step['times']}" if step["times"] > 1 else ""),
            "reads": step["reads"],
            "sends": step["sends"] and step["sends"]["name"],
            "what": step["purpose"],
        }
        for step in found["steps"]
    ]


def _travelling(found: Mapping[str, Any]) -> list[Row]:
    return [
        {
            "message": message["name"],
            "way": message["direction"],
            "field": name,
            "floats": field["floats"],
            "bytes": field["bytes"],
            "type": field["type"],
        }
        for message in found["messages"]
        for name, field in message["fields"].items()
    ]


def _remembered(found: Mapping[str, Any]) -> list[Row]:
    rows = []
    for place, memory in found["memories"].items():
        fields = memory["fields"] if memory else {"nothing": {"floats": None, "type": ""}}
        rows += [
            {"who": place, "what": name, "floats": field["floats"], "type": field["type"]}
            for name, field in fields.items()
        ]
    return rows


def refusal(error: Exception) -> str:
    """The message of an error; several faults stand in a list. A terminal does not cut words."""
    faults = getattr(error, "faults", [])
    told = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else str(error)
    said, indent = f"fedstill: {told}", ""
    if len(faults) > 1:
        lines = [f"  - {line}" for line in faults]
        said, indent = "\n".join([f"fedstill: {len(faults)} faults", *lines]), " " * 4
    return broken(said, indent) if sys.stderr.isatty() else said
