"""The command that makes a recipe: init, from options, a few questions, or one of ours."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from importlib.resources import as_file, files
from pathlib import Path
from typing import Annotated, Any

import typer

NEXT = {
    "fedstill data {file}": "how the data are split",
    "fedstill run {file} --quick": "a small variant, to see that it runs",
    "fedstill run {file} --seeds 0 1 2": "every method, three seeds",
    "fedstill compare runs/{name}": "what came of it",
}


def init(
    path: Annotated[Path, typer.Argument(metavar="FILE", help="The recipe to write.")] = Path(
        "recipe.toml"
    ),
    method: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="A method; may be repeated. See fedstill methods."),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="A data set, see fedstill data; or a folder of your own with a folder of class "
            "folders, or an .npz file, for each client.",
        ),
    ] = None,
    clients: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Split the data among this many clients.")
    ] = None,
    alpha: Annotated[
        float | None,
        typer.Option(
            metavar="NUMBER", help="Split by a Dirichlet distribution; small is very uneven."
        ),
    ] = None,
    model: Annotated[str | None, typer.Option(metavar="NAME", help="A network.")] = None,
    rounds: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Number of rounds.")
    ] = None,
    template: Annotated[
        str | None,
        typer.Option(
            "--from", metavar="NAME", help="Copy a recipe that comes with fedstill instead."
        ),
    ] = None,
    listing: Annotated[
        bool, typer.Option("--list", help="List the recipes that come with fedstill.")
    ] = False,
) -> None:
    """Write a recipe to start from: by options, by a few questions, or a copy of a built-in one."""
    if listing:
        for name in recipe_names():
            typer.echo(name)
        return
    given: dict[str, Any] = {
        "method": method, "data": data, "clients": clients, "alpha": alpha, "model": model,
        "rounds": rounds,
    }  # fmt: skip
    if template is None and not any(given.values()) and sys.stdin.isatty():
        given = asked()
    text = shipped(template) if template is not None else written(path, given)
    _write_new(path, text)
    typer.echo(f"{path} is written; next: fedstill run {path} --quick")


def asked() -> dict[str, Any]:
    """The same from a few questions."""
    methods = typer.prompt("Methods, e.g. fedavg, feddm, desa", default="fedavg, feddm")
    data = typer.prompt("Data set (fedstill data lists them), or your folder", default="digits5")
    clients = typer.prompt("Clients to split it among; 0 keeps its own", default=0, type=int)
    alpha = None
    if clients:
        alpha = typer.prompt("Dirichlet alpha, small is very uneven", default=0.5, type=float)
    rounds = typer.prompt("Rounds", default=10, type=int)
    return {
        "method": [name.strip() for name in methods.split(",") if name.strip()],
        "data": data, "clients": clients or None, "alpha": alpha, "model": None,
        "rounds": rounds,
    }  # fmt: skip


def written(path: Path, given: dict[str, Any]) -> str:
    """A recipe's text with these values; what is wrong with them is refused."""
    import tomllib

    from fedstill import recipe as config
    from fedstill.core.errors import RecipeError
    from fedstill.recipe.toml import toml_text

    if given["alpha"] is not None and given["clients"] is None:
        raise RecipeError("--alpha splits data among clients; say how many with --clients")
    name = path.stem if path.stem != "recipe" else "first"
    asked = "digits5" if given["data"] is None else given["data"]
    data, network = _data(asked, whole=given["clients"] is None)
    if given["clients"]:
        kind = {"kind": "iid"} if given["alpha"] is None else {"kind": "dirichlet"}
        share = {} if given["alpha"] is None else {"alpha": given["alpha"]}
        data["partition"] = {**kind, "clients": given["clients"], **share}
    tables = {
        "run": {"name": name, "rounds": given["rounds"] or 10},
        "data": data,
        "models": {"name": given["model"] or network},
    }
    methods = given["method"] or ["fedavg", "feddm"]
    text = _head(path.name, name) + "\n" + toml_text(tables)
    if "size" in data:
        line = f"size = {data['size']}"
        text = text.replace(line, f"{line}  # every image becomes so many pixels a side", 1)
    text += "".join(map(_method, methods))
    text += '\n[quick]\n"run.rounds" = 1\n"method.preset" = "small"\n'
    config.checked(tomllib.loads(text))
    return text


def _data(name: str, *, whole: bool) -> tuple[dict[str, Any], str]:
    """The table of a data set, or of what lies in a folder of one's own, and a network for it."""
    from fedstill.core.errors import DataError, RecipeError
    from fedstill.data.catalogue import DATASETS, entry_named
    from fedstill.data.found import found_at

    if name == "own":
        raise RecipeError(
            "--data own: name the folder instead, e.g. --data photos, which holds a folder of "
            "class folders, or an .npz file, for each client"
        )
    path = Path(name)
    mine = name and (path.is_dir() or (path.suffix == ".npz" and path.is_file()))
    if name in DATASETS or not mine:
        try:
            entry_named(name)
        except DataError as error:
            nor = "" if path.exists() else "; nor is there a folder of that name"
            raise RecipeError(f"--data: {error}{nor}") from error
        return {"name": name}, "convnet"
    found = found_at(path)
    alone = " alone; --clients splits what it holds" if len(found.clients) == 1 and whole else ""
    typer.echo(f"found in {found.folder}: {', '.join(found.clients)}{alone}")
    size = {} if found.size is None else {"size": found.size}
    where = {"data_dir": str(found.folder), **size}
    table = {"name": "own", **where, "options": {"clients": found.clients}}
    return table, "mlp" if found.vectors else "convnet"


def shipped(name: str) -> str:
    """The text of a recipe that comes with fedstill."""
    from fedstill.core.errors import RecipeError, unknown

    known = dict(_recipes())
    if name.removesuffix(".toml") not in known:
        raise RecipeError("--from: " + unknown("recipe", name, known))
    return known[name.removesuffix(".toml")].read_text(encoding="utf-8")


def recipe_names() -> list[str]:
    """The names of the recipes that come with fedstill."""
    return [name for name, _ in _recipes()]


def _recipes() -> Iterator[tuple[str, Path]]:
    """Those in the package, and in a checkout those of the repository."""
    with as_file(files("fedstill") / "recipes") as inside:
        places: Sequence[Path] = (inside, Path(__file__).parents[3] / "recipes")
        seen: dict[str, Path] = {}
        for place in places:
            for path in sorted(place.rglob("*.toml")) if place.is_dir() else ():
                seen.setdefault(str(path.relative_to(place).with_suffix("")), path)
    yield from sorted(seen.items())


def _head(file: str, name: str) -> str:
    """What to do with a recipe, as comments."""
    commands = {command.format(file=file, name=name): what for command, what in NEXT.items()}
    widest = max(map(len, commands))
    lines = (f"#   {command:{widest}}   {what}\n" for command, what in commands.items())
    return "# A recipe for fedstill. Change what you like, then:\n" + "".join(lines)


def _method(name: str) -> str:
    """A method's table, with its values as they stand otherwise."""
    from dataclasses import fields

    from fedstill.core.errors import RecipeError
    from fedstill.methods import METHOD_NAMES

    wrong = METHOD_NAMES.wrong(name)
    if wrong:
        raise RecipeError(f"--method: {wrong}")
    plain = (int, float, str, bool)
    values = [
        f"{f.name} = {json.dumps(f.default)}" for f in fields(METHOD_NAMES[name])
        if f.init and isinstance(f.default, plain)
    ]  # fmt: skip
    return (
        f'\n[[method]]\nname = "{name}"\n# by default: {", ".join(values[:3])}\n'
        f"# all values of the method: fedstill show {name}\n"
    )


def _write_new(path: Path, text: str) -> None:
    from fedstill.core.errors import RecipeError

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise RecipeError(f"{path} is there already; give another name") from None
    except OSError as error:
        raise RecipeError(f"{path} cannot be written: {error.strerror or error}") from error
