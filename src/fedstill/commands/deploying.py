"""Commands for runs between parties that keep their data: deploy, site, peer."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from fedstill.commands.options import Overrides

deploy = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Create, run and watch a deployment between sites.",
)
site = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="Take part in a deployment as a site."
)
peer = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="Take part without a coordinator."
)
LONGEST_SILENCE = 30.0  # seconds; a coordinator that runs says every second where it is
GROUPS = {"deploy": deploy, "site": site, "peer": peer}

Out = Annotated[Path, typer.Argument(metavar="DIR", help="The deployment's folder.")]
Own = Annotated[Path, typer.Argument(metavar="DIR", help="The invitation folder of this site.")]
DataDir = Annotated[
    str | None,
    typer.Option(
        metavar="DIR", help="Folder with the files of public data, if the recipe has some."
    ),
]


@contextmanager
def _installed() -> Iterator[None]:
    """Say what to install where the libraries of sites are missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        from fedstill.core.errors import SiteError

        if error.name is None or error.name.split(".")[0] not in ("zenoh", "cryptography"):
            raise
        raise SiteError(
            f"{error.name} is missing; sites need it: pip install 'fedstill[sites]'"
        ) from error


@deploy.command(short_help="Create a coordinator's folder and an invitation for each site.")
def make(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="A recipe, a .toml file.")],
    overrides: Overrides = None,
    address: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Where sites reach the coordinator.")
    ] = "",
    peer: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=HOST:PORT",
            help="Without a coordinator: where a peer listens; repeat it for each peer that can.",
        ),
    ] = None,
    out: Annotated[Path, typer.Option(metavar="DIR", help="A new folder.")] = Path("deployment"),
    only: Annotated[
        str | None, typer.Option(metavar="LABEL", help="Which method, if the recipe has several.")
    ] = None,
    deadline: Annotated[
        float, typer.Option(metavar="SECONDS", help="How long sites have to answer a step.")
    ] = 600.0,
    start_deadline: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            help="How long all sites have to connect, and for the steps before round 1.",
        ),
    ] = 600.0,
    gone: Annotated[
        float,
        typer.Option(metavar="SECONDS", help="How long a lost connection may take to come back."),
    ] = 90.0,
    least: Annotated[
        int, typer.Option(metavar="N", help="Sites that must answer each step.", min=0)
    ] = 1,
) -> None:
    """Create a deployment from a recipe: a coordinator's folder and an invitation per site."""
    with _installed():
        from fedstill import recipe as config
        from fedstill.deploy import folder as folders
        from fedstill.sites.away import Patience

    labels = [only] if only else []
    recipes = config.checked(config.read_recipe(recipe, overrides or [], only=labels))
    recipes = config.chosen(recipes, labels)
    if len(recipes) != 1:
        from fedstill.core.errors import RecipeError

        known = ", ".join(one.label for one in recipes)
        raise RecipeError(f"a deployment plays one method; choose one with --only: {known}")
    made = folders.make(
        recipes[0], out, address=address, addresses=_addresses(peer or [], address),
        patience=Patience(start_deadline, deadline, gone, least),
    )  # fmt: skip
    typer.echo(f"run {made.run}, number {made.number}")
    typer.echo(
        f"send to each site its folder in {out / 'invitations'}, and tell it the number on another "
        "way, such as by telephone"
    )
    then = f"fedstill deploy start {out}" if address else "each site: fedstill peer start DIR"
    typer.echo(f"then: fedstill deploy sign {out} SITE.csr for each site, and {then}")


def _addresses(pairs: list[str], address: str) -> dict[str, str]:
    from fedstill.core.errors import BadValue

    if bool(pairs) == bool(address):
        raise BadValue(
            "give --address HOST:PORT of the coordinator, or, for a method whose clients speak to "
            "each other, --peer NAME=HOST:PORT for each peer that can listen"
        )
    wrong = [pair for pair in pairs if "=" not in pair]
    if wrong:
        raise BadValue([f"--peer {pair}: write it as NAME=HOST:PORT" for pair in wrong])
    named = [pair.split("=", 1)[0] for pair in pairs]
    if twice := sorted({name for name in named if named.count(name) > 1}):
        raise BadValue([f"--peer {name} is given more than once" for name in twice])
    return dict(pair.split("=", 1) for pair in pairs)


@deploy.command()
def sign(
    folder: Out,
    requests: Annotated[
        list[Path], typer.Argument(metavar="SITE.csr", help="Requests from sites.")
    ],
    days: Annotated[
        int, typer.Option(metavar="N", help="Days for which a certificate is valid.", min=1)
    ] = 365,
) -> None:
    """Sign the sites' certificate requests; their keys never leave them."""
    with _installed():
        from fedstill.deploy import folder as folders
        from fedstill.deploy.place import spoken
        from fedstill.sites.certificates import key_digest

    for file in requests:
        before = folders.signed_for(folder, file.stem)
        signed = folders.sign(folder, file, days)
        if before is not None and before != key_digest(signed):
            typer.echo(
                f"{file.stem} has a certificate for another key, {spoken(before)}, which stays "
                "valid: did it lose that key, or does somebody else ask in its name?"
            )
        typer.echo(
            f"signed {signed} for the key {spoken(key_digest(signed))}; if {file.stem} tells you "
            "the same number, on another way than the request came, send it back"
        )


@deploy.command(short_help="Run the coordinator, or continue after a stop.")
def start(folder: Out, data_dir: DataDir = None) -> None:
    """Run the coordinator, from the beginning or from where it was stopped or killed."""
    with _installed():
        from fedstill.deploy import coordinator

    try:
        found = coordinator.start(folder, typer.echo, data_dir)
    except KeyboardInterrupt:
        typer.echo(f"fedstill: stopped; go on with `fedstill deploy start {folder}`", err=True)
        raise typer.Exit(130) from None
    typer.echo(f"done → {found}")


@deploy.command(short_help="Write the files to run a deployment over Flower.")
def flower(
    folder: Out,
    port: Annotated[
        int,
        typer.Option(
            metavar="N", help="Port of the SuperLink, on this machine only.", min=1, max=65535
        ),
    ] = 8000,
) -> None:
    """Write the files to run a deployment over Flower: app, keys, commands, nginx filter."""
    with _installed():
        from fedstill.deploy import flower as flowers

    place = flowers.write(folder, port)
    typer.echo(f"in {place}: superlink.sh, register.sh, nginx.conf, run.sh")
    typer.echo(f"filter: nginx -c {place / 'nginx.conf'}")
    typer.echo("whoever reaches the SuperLink itself can run code at all sites: only the filter's")
    typer.echo(f"address is for others, port {port} is for nobody outside this machine")


@deploy.command(short_help="Ask the coordinator to stop; it can be started again.")
def stop(folder: Out) -> None:
    """Ask the coordinator to stop; started again, it continues exactly where it was."""
    from fedstill.deploy.board import ask_to_stop

    ask_to_stop(folder / "coordinator" / "run")
    typer.echo(f"asked; go on with `fedstill deploy start {folder}`")


@deploy.command(
    name="status", short_help="Show each site's step, when it was last seen, and its traffic."
)
def deploy_status(
    folder: Out,
    watch: Annotated[
        bool, typer.Option("--watch", help="Keep showing it until the run has ended.")
    ] = False,
) -> None:
    """Show each site's step, when it was last seen, and how many bytes it sent and received."""
    from rich.console import Console
    from rich.live import Live

    from fedstill.deploy.board import FILE, read_board

    place, screen = folder / "coordinator" / "run", Console()
    if not watch:
        screen.print(_table(read_board(place)))
        return
    if not (place / FILE).exists():
        screen.print(f"nothing runs in {place} yet; waiting for `fedstill deploy start`")
    while not (place / FILE).exists():
        time.sleep(0.2)
    with Live(_table(read_board(place)), console=screen) as live:
        while not (found := read_board(place))["ended"]:
            live.update(_table(found))
            time.sleep(1)
        live.update(_table(found))


def _table(board: Any) -> Any:
    from rich.table import Table

    from fedstill.report.amounts import human_bytes

    score = "" if board["score"] is None else f" · {board['score']:.4f}"
    away = time.time() - board["at"]
    state = " · ended" if board["ended"] else ""
    if not board["ended"] and away > LONGEST_SILENCE:
        state = f" · stopped or killed {away:.0f} s ago"
    table = Table(title=f"{board['run']} · round {board['round']}/{board['rounds']}{score}{state}")
    for column in ("site", "here", "round", "step", "said", "last seen", "sent", "received"):
        table.add_column(column)
    for name, row in board["sites"].items():
        ago = "never" if row["last_seen"] is None else f"{time.time() - row['last_seen']:.0f} s ago"
        here = row["here"] and not state
        table.add_row(
            name, "yes" if here else "no", str(row["round"]), row["step"], row["said"],
            ago, human_bytes(row["bytes_sent"]), human_bytes(row["bytes_received"]),
        )  # fmt: skip
    return table


@site.command(short_help="See what will leave this site, agree, and create its key.")
def join(
    folder: Own,
    data: Annotated[
        Path, typer.Option(metavar="PATH", help="This site's images: a folder or an .npz file.")
    ],
    agree: Annotated[
        str | None,
        typer.Option(metavar="NUMBER", help="Take part: the number that the coordinator told you."),
    ] = None,
    allow_examples: Annotated[
        bool,
        typer.Option(
            "--allow-examples",
            help="Take part even if the method sends examples, or images that began as examples.",
        ),
    ] = False,
    tell_counts: Annotated[
        bool,
        typer.Option(
            "--tell-counts", help="Tell the coordinator how many examples of each class there are."
        ),
    ] = False,
    most_acts: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Answer at most this many different requests.  "
            "[default: twice the recipe's steps]",
        ),
    ] = None,
    most_epsilon: Annotated[
        float | None,
        typer.Option(metavar="EPSILON", help="Refuse runs that spend more privacy than this."),
    ] = None,
    most_delta: Annotated[
        float | None,
        typer.Option(metavar="DELTA", help="The largest delta at which epsilon is promised."),
    ] = None,
    data_dir: DataDir = None,
    device: Annotated[
        str, typer.Option(metavar="NAME", help="auto, cpu, cuda or cuda:0.")
    ] = "auto",
) -> None:
    """See what will leave this site, agree to it, and create a key that stays here."""
    with _installed():
        from fedstill.deploy import site as sites
        from fedstill.deploy.place import own_data, spoken
        from fedstill.sites.certificates import key_digest
        from fedstill.sites.site import Policy

    invited = sites.opened(folder, data_dir)
    for line in _leaving(invited.recipe, invited.deployment):
        typer.echo(line)
    policy = Policy(allow_examples, tell_counts, most_acts, most_epsilon, most_delta)
    policy.check(invited.recipe.method)
    policy.check_privacy(invited.recipe.privacy)
    if agree is None:
        found = own_data(invited.recipe, invited.deployment.name, str(data.absolute()))
        typer.echo(_held(invited.deployment.name, found))
        typer.echo("to take part, add --agree NUMBER with the number that the coordinator told you")
        return
    asked = sites.join(invited, data, agree, policy, data_dir=data_dir, device=device)
    name = invited.deployment.name
    typer.echo(f"send {asked} to the coordinator; put the {name}.pem that comes back into {folder}")
    typer.echo(f"and tell it the number of your key by telephone: {spoken(key_digest(asked))}")
    kind = "site" if invited.deployment.address else "peer"
    typer.echo(f"then: fedstill site check {folder}, and fedstill {kind} start {folder}")


def _leaving(recipe: Any, deployment: Any) -> Iterator[str]:
    """What leaves a site: fields, bytes, how often."""
    from fedstill.commands import show as shows
    from fedstill.deploy.place import networks
    from fedstill.privacy.privacy import PROMISE
    from fedstill.report.amounts import human_bytes

    models, _ = networks(recipe)
    network = models[deployment.name]
    public = recipe.data.public.count or 1000 if recipe.data.public else 0
    stage = shows.Stage(network, network.classes, public=public)
    method, rounds = recipe.method, recipe.run.rounds
    others = [name for name in deployment.sites if name != deployment.name]
    yield f"{deployment.name}: {recipe.method_name}, {rounds} rounds, with {', '.join(others)}"
    steps = shows.shown(method, recipe.method_name, stage)["steps"]
    own = [step for step in steps if step["at"] == "clients"]
    for step in own:
        if not step["sends"]:
            continue
        often = "once" if step["part"] != "each round" else f"in each of {rounds} rounds"
        times = f", {step['times']} times" if step["times"] > 1 else ""
        fields = ", ".join(
            f"{name} ({human_bytes(field['bytes'])})"
            for name, field in step["sends"]["fields"].items()
        )
        yield f"  leaves this site in {step['name']}, {often}{times}: {fields}"
    if recipe.privacy is not None and recipe.privacy.valid:
        yield (
            f"  differential privacy: epsilon = {recipe.privacy.epsilon:g} at delta = "
            f"{recipe.privacy.delta:g} for the whole run, with noise from a key that stays here, "
            f"of {PROMISE[recipe.privacy.labels]}"
        )
    elif recipe.privacy is not None:
        yield f'  its noise (mechanism = "{recipe.privacy.mechanism}") promises nothing'
    if method.sends_examples:
        yield "  this method shows training examples to others"
    elif method.begins_with_examples:
        yield '  its images begin as training examples (start = "real") and may still show them'
    if deployment.address:
        logged = [f"{', '.join(step['logs'])} of {step['name']}" for step in own if step["logs"]]
        besides = ["mean losses of training", *logged, "scores on its test set"]
        yield f"  leaves this site besides: {', '.join(besides)}"
    yield f"  number {deployment.number} (compare it with what the coordinator tells you)"


def _held(name: str, found: Any) -> str:
    """What a site has: images, their shape, and how many of each class."""
    (own,) = found.sites
    counts = dict(zip(found.class_names, own.counts(found.classes).tolist(), strict=True))
    by_class = ", ".join(f"{label} {count}" for label, count in counts.items())
    shape = "x".join(map(str, found.shape))
    return (
        f"{name}: {len(own)} training and {len(own.test)} test images {shape}; by class {by_class}"
    )


@site.command()
def check(folder: Own) -> None:
    """Check this site's data and certificate, without connecting."""
    with _installed():
        from fedstill.core.errors import SiteError
        from fedstill.deploy import site as sites

    invited, found, wrong = sites.checked(folder)
    typer.echo(_held(invited.deployment.name, found))
    for note in found.notes:
        typer.echo(f"  {note}")
    if wrong:
        raise SiteError("\n".join(wrong))
    sites.check_noise(invited)
    typer.echo(f"ready: fedstill {'site' if invited.deployment.address else 'peer'} start {folder}")


@site.command(name="start", short_help="Answer the coordinator until the run is over.")
def site_start(
    folder: Own,
    flower: Annotated[
        Path | None,
        typer.Option(
            metavar="NODE", help="Answer through Flower: the folder of this machine's SuperNode."
        ),
    ] = None,
    wait: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            help="How long to try to reach a coordinator that went away.",
            min=1,
        ),
    ] = 3600,
) -> None:
    """Answer the coordinator until the run is over; reconnects when the connection is lost."""
    with _installed():
        from fedstill.deploy import flower as flowers
        from fedstill.deploy import site as sites

    try:
        if flower is None:
            sites.start(folder, typer.echo, wait=wait)
        else:
            flowers.start_site(folder, flower, typer.echo)
    except KeyboardInterrupt:
        typer.echo(f"fedstill: stopped; go on with `fedstill site start {folder}`", err=True)
        raise typer.Exit(130) from None


@site.command(name="status")
def site_status(folder: Own) -> None:
    """Show what this site has answered, and how many bytes left it."""
    with _installed():
        from fedstill.deploy import site as sites
        from fedstill.deploy.folder import read_deployment
    from fedstill.report.amounts import human_bytes

    read_deployment(folder)  # refused where it is the folder of no deployment
    rows = sites.answers(folder)
    if (said := sites.spent(folder)) is not None:
        typer.echo(said)
    if not rows:
        typer.echo("nothing was asked yet")
        return
    sent = sum(int(row["bytes_out"]) for row in rows)
    refused = sum(row["said"] != "ok" for row in rows)
    typer.echo(f"{len(rows)} answers, {refused} of them refusals; {human_bytes(sent)} left")
    last = rows[-1]
    typer.echo(f"last: {last['at']} round {last['round'] or '-'} {last['asked']}: {last['said']}")


@peer.command(name="start", short_help="Take part, from the start or from the last checkpoint.")
def peer_start(folder: Own) -> None:
    """Take part without a coordinator, from the beginning or from where this peer was stopped."""
    with _installed():
        from fedstill.deploy import peer as peers

    try:
        found = peers.start(folder, typer.echo)
    except KeyboardInterrupt:
        typer.echo(f"fedstill: stopped; go on with `fedstill peer start {folder}`", err=True)
        raise typer.Exit(130) from None
    typer.echo(f"done → {found}")
