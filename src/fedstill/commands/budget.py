"""The command `privacy`: what a run has spent of its budget, or what a recipe would."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedstill.commands import listings
from fedstill.commands.listings import Form, Row
from fedstill.commands.options import DataDir, Listing, Overrides, Quick, data_dir_change

if TYPE_CHECKING:
    from fedstill.core.release import Spending
    from fedstill.privacy.privacy import Privacy
    from fedstill.recipe.tables import Recipe


def privacy(
    target: Annotated[
        Path, typer.Argument(metavar="DIR|RECIPE", help="A run folder, or a recipe to be run.")
    ],
    overrides: Overrides = None,
    data_dir: DataDir = None,
    quick: Quick = False,
    form: Listing = Form.table,
) -> None:
    """Show what a run has spent of its privacy budget, or what a recipe would, and the noise."""
    if target.is_dir():
        told = [of_run(target)]
    else:
        from fedstill import recipe as config

        changes = [*(overrides or []), *data_dir_change(data_dir)]
        recipes = config.checked(config.read_recipe(target, changes, quick=quick))
        told = [of_recipe(recipe) for recipe in recipes]
    if form is Form.json:
        listings.print_json(told if len(told) > 1 else told[0])
        return
    for one in told:
        print(f"{one['title']}\n" if form is Form.table else f"**{one['title']}**\n")
        if one["clients"]:
            listings.print_rows(one["clients"], form)
        print("\n" + "\n".join(_bullet(line, form) for line in one["words"]))


def _bullet(line: str, form: Form) -> str:
    """A line of a list; in a terminal no wider than that."""
    if form is not Form.table:
        return f"- {line}"
    return listings.broken(f"- {line}", "  ")


def of_run(folder: Path) -> dict[str, Any]:
    """What the ledger of a run folder says."""
    from fedstill.core.errors import RunFolderError
    from fedstill.logbook.reader import read_run
    from fedstill.privacy.privacy import SIMULATED, Plan, Privacy

    run = read_run(folder, unfinished=True)
    asked = run.recipe.get("privacy")
    if not asked:
        raise RunFolderError(
            f"{folder} keeps nothing private: its recipe has no table [privacy], so nothing is "
            "promised of its records"
        )
    known = {key: value for key, value in asked.items() if key != "plan"}
    done = "" if run.summary else ", not finished"
    # What a run said of its noise at its beginning: at sites it is made with keys of their own.
    said = [note.text for note in run.notes if note.kind == "privacy"]
    secret = Plan({}, {}, secret=bool(said) and SIMULATED not in said)
    return told(Privacy(**known, plan=secret), run.privacy, f"{folder}{done}: spent")


def of_recipe(recipe: Recipe) -> dict[str, Any]:
    """What a recipe would spend, found by rehearsing it; nothing is trained or released."""
    from dataclasses import replace

    from fedstill.core.errors import RecipeError
    from fedstill.federation.budget import calibrated
    from fedstill.federation.experiment import Experiment
    from fedstill.recipe.build import execution_of, experiment_of

    if recipe.privacy is None:
        raise RecipeError(
            "privacy is missing: the recipe has no table [privacy]; name a budget, e.g. "
            "privacy.epsilon=4 privacy.delta=1e-5"
        )
    experiment, execution = experiment_of(recipe), execution_of(recipe)
    if recipe.data.virtual is not None and not recipe.method.distils:
        experiment = Experiment(
            recipe.data.virtual,
            experiment.population,
            rounds=0,
            seed=experiment.seed,
            topology=experiment.topology,
            privacy=experiment.privacy,
        )
    with execution.applied(experiment.networks):
        found = calibrated(experiment, execution).privacy
    assert found is not None and found.plan is not None
    rows = [row for own in found.plan.rows().values() for row in own]
    return told(replace(found, plan=None), rows, f"{recipe.label}: would spend")


def told(privacy: Privacy, rows: Iterable[Spending], title: str) -> dict[str, Any]:
    """The rows by client, and what they mean in words."""
    from fedstill.privacy.summary import by_node, words_of

    listed = [_row(privacy, client, own) for client, own in by_node(rows).items()]
    budget = f"epsilon = {privacy.epsilon:g} at delta = {privacy.delta:g}"
    if not privacy.valid:
        budget = f"no epsilon (claimed for each round: {privacy.epsilon:g})"
    return {
        "title": f"{title}, of a budget of {budget}",
        "privacy": privacy.table(),
        "clients": listed,
        "words": words_of(privacy),
    }


def _row(privacy: Privacy, client: str, rows: Sequence[Spending]) -> Row:
    from fedstill.privacy.summary import epsilon_of_rows

    kinds: dict[tuple[str, float, float], int] = {}
    for row in rows:
        kind = (row.mechanism, row.sigma, row.rate)
        kinds[kind] = kinds.get(kind, 0) + row.releases
    spent = "-"
    if privacy.valid:
        epsilon = epsilon_of_rows(rows, privacy.delta)
        spent = f"{epsilon:.4g}" if isfinite(epsilon) else "unknown"  # as a site may say anything
    uses = [
        f"{number} of {mechanism}, noise {sigma:.4g}"
        + (f", each record with chance {rate:.3g}" if rate < 1 else "")
        for (mechanism, sigma, rate), number in kinds.items()
    ]
    return {"client": client, "epsilon": spent, "releases": "; ".join(uses)}
