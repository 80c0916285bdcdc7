"""What holds for every method: CHECKS, one visible table, and `check`, which goes through it.

A check is a function of a `Case`, a method in its federation. It raises `Differs` with what
differed, in words, and may return a remark on what it saw. Whoever knows of another promise that
every method should keep enters it into CHECKS under a name; its docstring is what the table of a
report says.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields
from functools import cached_property
from itertools import pairwise, zip_longest
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from fedstill.channels import Channel, EightBit, Half, TopK
from fedstill.core.content import refusal
from fedstill.core.errors import BadMessage, FedstillError, unknown
from fedstill.core.method import Method, Place, check_protocol, steps_of
from fedstill.core.records import Direction
from fedstill.engines.play.batched import Batched
from fedstill.engines.play.in_process import InProcess
from fedstill.federation.population import Party
from fedstill.federation.post import SAID_BY
from fedstill.federation.run import run
from fedstill.federation.sampling import Sample, Scripted
from fedstill.logbook.writer import MemoryLog
from fedstill.testing import worlds
from fedstill.testing.budgets import (
    Unprivate,
    expect_as_planned,
    expect_noise,
    planned_uses,
    summed_up,
)
from fedstill.testing.closely import (
    Backwards,
    Differs,
    Heard,
    Standing,
    Traced,
    altered,
    expect_finite,
    expect_same,
    expect_same_after_the_wire,
    memories,
    scores,
    shown_examples,
    written,
)
from fedstill.testing.lies import lies
from fedstill.testing.outside import changed
from fedstill.testing.walls import behind_walls
from fedstill.testing.worlds import World

ROUNDS = 4


class Broken(FedstillError):
    """A method does not keep the contract; `check` is the name of the check that found it."""

    def __init__(self, method: str, check: str, problem: str):
        self.method, self.check, self.problem = method, check, problem
        promise = f": {promise_of(CHECKS[check])}" if check in CHECKS else ""
        super().__init__(f"{method} breaks {check!r}{promise}\n{problem}")


@dataclass(frozen=True)
class Case:
    """A method in the federation that it is checked in, in which runs can be compared.

    `plain` is the same federation with networks without norm layers: a bias before a norm has no
    gradient but rounding errors, which Adam blows up to whole steps without any effect.
    """

    method: Method
    world: World
    plain: World

    def played(
        self,
        rounds: int = ROUNDS,
        engine: type[InProcess] = InProcess,
        world: World | None = None,
        **options: Any,
    ) -> tuple[InProcess, MemoryLog]:
        """The engine and the logbook after some rounds."""
        return worlds.played(
            self.method, self.world if world is None else world, rounds, engine, **options
        )

    @cached_property
    def straight(self) -> tuple[InProcess, MemoryLog]:
        """Four rounds as they are, which several checks compare others with; played once."""
        return self.played()

    @cached_property
    def after_ten(self) -> MemoryLog:
        """The logbook of a run of ten rounds; of `straight` gone on with, unless that had an end.

        Steps after the last round may have changed what is remembered.
        """
        if self.method.after():
            return self.played(10)[1]
        engine: InProcess = worlds.engine_for(self.method, self.world, rounds=10)
        with TemporaryDirectory() as folder:
            self.straight[0].save(Path(folder), ROUNDS, digest="d")
            engine.load(Path(folder), digest="d")
        log = MemoryLog()
        run(engine, log, done=ROUNDS)
        return log

    def heard(self, rounds: int = 2) -> Heard:
        """The engine after some rounds, with every message that was said."""
        before = Standing.of(self.method, self.world)
        engine, log = self.played(rounds, Heard)
        assert isinstance(engine, Heard)
        engine.log, engine.before = log, before
        engine.after = Standing.of(self.method, self.world)
        return engine

    @cached_property
    def overheard(self) -> Heard:
        """The same after two rounds, played once."""
        return self.heard()


@dataclass(frozen=True)
class Report:
    """What came out, check by check: None where the promise was kept; and what checks remark."""

    method: str
    problems: Mapping[str, str | None]
    remarks: Mapping[str, str] = field(default_factory=dict)

    @property
    def broken(self) -> list[str]:
        """The checks that the method does not pass."""
        return [name for name, problem in self.problems.items() if problem is not None]

    def __str__(self) -> str:
        width = max(map(len, self.problems), default=0)
        more = {name: problem or self.remarks.get(name) for name, problem in self.problems.items()}
        lines = [
            f"{name:{width}}  {'kept' if problem is None else 'BROKEN'}  {promise_of(CHECKS[name])}"
            + (f"\n{'':{width}}  {more[name]}" if more[name] else "")
            for name, problem in self.problems.items()
        ]
        return "\n".join([f"{self.method}: {len(self.broken)} of {len(lines)} broken", *lines])


def check(
    method: Method | type[Method],
    *,
    world: World | None = None,
    only: Collection[str] | None = None,
    raising: bool = True,
) -> Report:
    """Hold a method to the contract; raise `Broken` at the first promise that it does not keep.

        report = check(MyMethod)                     # with its preset "small", if it has one
        report = check(MyMethod(lr=0.1), raising=False)
        print(report)

    It is played in `world`, a federation of at least three clients (`worlds.pictures()` unless
    another is given, e.g. `worlds.vectors()`). `only` names some of the CHECKS. Without `raising`
    every check is made, and the report says which were broken.
    """
    asked = list(CHECKS if only is None else only)
    for name in asked:
        if name not in CHECKS:
            raise FedstillError(unknown("check", name, CHECKS))
    title = (method if isinstance(method, type) else type(method)).__name__
    try:
        made = small(method) if isinstance(method, type) else method
    except (FedstillError, TypeError) as error:  # no such object can be made
        if raising:
            raise Broken(title, "plan", _told(error)) from error
        return Report(title, {"plan": _told(error)})
    case = case_of(made, world)
    problems: dict[str, str | None] = {}
    remarks: dict[str, str] = {}
    for name in asked:
        try:
            remarks[name] = CHECKS[name](case) or ""
            problems[name] = None
        except Exception as error:  # whatever a method does wrong, the report goes on
            problems[name] = _told(error)
            if raising:
                raise Broken(title, name, _told(error)) from error
    return Report(title, problems, remarks)


def case_of(method: Method, world: World | None = None) -> Case:
    """A method in a federation of its own, or in the one that is given."""
    if world is not None:
        return Case(method, world, world)
    return Case(method, worlds.pictures(), worlds.pictures(norm="none"))


def small(kind: type[Method]) -> Method:
    """The method with little work to do: by its preset `small`, or as it is without values."""
    return kind(**kind.presets.get("small", {}))


def promise_of(check: Check) -> str:
    """The first line of a check's docstring."""
    return (check.__doc__ or "").strip().split("\n")[0]


# The checks.


def plan(case: Case) -> None:
    """Each step reads what the step before sends; method, steps and messages are documented."""
    check_protocol(case.method)
    for part in (case.method.before(), case.method.each_round(), case.method.after()):
        for step, following in pairwise([*part, None]):
            if step is not None and step.sends and (following is None or not following.reads):
                after = (
                    f"the step after it, {following.name}, reads nothing"
                    if following
                    else ("no step comes after it")
                )
                raise Differs(f"{step.title} sends {step.sends.__name__} to nobody: {after}")
    for step in steps_of(case.method):
        if not step.purpose:
            raise Differs(f"{step.title} has no docstring; write one line that says what it does")
        if step.sends is not None and not _documented(step.sends):
            raise Differs(f"{step.sends.__name__}, which {step.title} sends, has no docstring")
    if not _documented(type(case.method)):
        raise Differs(f"{type(case.method).__name__} has no docstring")


def purity(case: Case) -> None:
    """Nothing is kept but in memories, drawn but by purpose, or written into: messages, data."""
    method, engine = case.method, case.overheard
    before, after = engine.before, engine.after
    if (after.values, after.hashed) != (before.values, before.hashed):
        raise Differs("its values changed while it was played; what is remembered belongs in State")
    for name, state in after.generators.items():
        if state != before.generators[name]:
            raise Differs(f"it drew from {name}; ask for randomness by purpose: node.rng('order')")
    for (_, step, sender, message), was in zip(engine.said, engine.copies, strict=True):
        for name in altered(message, was):
            raise Differs(
                f"{name}, which {sender} sent in {step}, was written into later; make a new one"
            )
    for step, node, name in engine.overwritten:
        raise Differs(
            f"{step} of {node} wrote into {name} of its memory; make a new record and replace "
            "node.state, or nobody knows that it has changed"
        )
    for name, digest in after.examples.items():
        if digest != before.examples[name]:
            raise Differs(f"the {name} were changed while it was played")
    for name in changed(before.outside, after.outside):
        raise Differs(
            f"{name} changed while it was played; what is remembered belongs in State, and what "
            "follows from values alone in a function under functools.cache"
        )
    twin = type(method)(**{f.name: getattr(method, f.name) for f in fields(method)})
    if twin != method or hash(twin) != after.hashed:
        raise Differs("two objects of the same values are not equal; make it a frozen dataclass")


def repeat(case: Case) -> None:
    """Played again, a run is the same, bit for bit."""
    one, log = case.straight
    other, other_log = case.played()
    with _advising(
        "Does it read the clock, draw otherwise than by node.rng, or keep something outside of "
        "State?"
    ):
        expect_same(memories(one), memories(other), "in one run", "in the next")
        if scores(log) != scores(other_log):
            raise Differs("the scores of two runs differ")


def engines_agree(case: Case) -> None:
    """Memories after four rounds are those of stacked clients to 1e-4, losses of two to 1e-3."""
    with _advising(
        "Where its objective keeps and draws nothing, a rounding error decides something: the sign "
        "of a difference of equal outputs (|x| near 0), a norm of nothing, Adam's step along a "
        "gradient of zero"
    ):
        plain, _ = case.played(world=case.plain)
        stacked, _ = case.played(world=case.plain, engine=Batched)
        expect_same(memories(plain), memories(stacked), "in_process", "batched", 1e-4)
        _, stacked_log = case.played(2, engine=Batched)
        losses, others = scores(case.overheard.log, "loss"), scores(stacked_log, "loss")
        if losses.keys() != others.keys():
            raise Differs("in_process and batched score different models")
        for (round, node, target), loss in losses.items():
            if not abs(others[round, node, target] - loss) <= 1e-3:
                other = others[round, node, target]
                raise Differs(
                    f"the loss of {node} at {target} after round {round} is {loss:.6g} in "
                    f"in_process and {other:.6g} in batched"
                )


def compiled(case: Case) -> None:
    """A round whose steps are traced as for compilation gives the plain memories to 1e-4."""
    plain, _ = case.played(1, world=case.plain)
    traced, _ = case.played(1, Traced, world=case.plain)
    assert isinstance(traced, Traced)
    if traced.resisted:
        raise Differs("; ".join(traced.resisted))
    expect_same(memories(plain), memories(traced), "as they are", "traced", 1e-4)


def resume(case: Case) -> None:
    """Saved at round two and continued is a straight run, bit for bit."""
    expect_resumed(case, case.straight[0])


class _Interrupted(Exception):
    """A run is broken off: steps after its last round were not played."""


def expect_resumed(case: Case, straight: InProcess, channels: Sequence[Channel] = ()) -> None:
    """A run saved half-way and continued is a straight one."""
    method, rounds = case.method, straight.experiment.rounds
    half = rounds // 2
    with TemporaryDirectory() as folder:
        first: InProcess = worlds.engine_for(method, case.world, rounds=rounds, channels=channels)

        def save(round: int) -> None:
            first.save(Path(folder), round, digest="d")
            if round == half:
                raise _Interrupted

        with suppress(_Interrupted):
            run(first, MemoryLog(), save=save)
        second: InProcess = worlds.engine_for(method, case.world, rounds=rounds, channels=channels)
        saved = second.load(Path(folder), digest="d")
    if saved is None or saved.round != half:
        raise Differs(f"no checkpoint of round {half} could be read back")
    run(second, MemoryLog(), done=saved.round)
    resumed = f"one resumed after round {half}"
    expect_same(memories(straight), memories(second), "a straight run", resumed)


EVERY_WAY: tuple[Direction, ...] = ("up", "down", "peer")
EIGHT_BIT = EightBit(directions=EVERY_WAY, stochastic=True, least=1)
TOP_K = TopK(directions=EVERY_WAY, share=0.3, least=1)


def channels(case: Case) -> None:
    """With eight bits and with top-k fewer bytes travel and a resumed run is the straight one.

    Where messages are coded without chance, engines agree up to a step of the code.
    """
    heard = case.heard(1)
    tensors = [tensor for *_, message in heard.said for tensor in message.tensors().values()]
    codable = any(tensor.is_floating_point() and tensor.numel() > 16 for tensor in tensors)
    for channel in (EIGHT_BIT, TOP_K):
        engine, log = case.played(1, channels=[channel])
        expect_finite(engine, f"with {channel}")
        if _said(heard.log) != _said(log):
            raise Differs(f"with {channel} other messages are said than without it")
        before, after = (sum(row.bytes for row in one.messages) for one in (heard.log, log))
        if after > before or (codable and after == before):
            raise Differs(f"{before} bytes travel, and with {channel} {after}")
    both = [TOP_K, EIGHT_BIT]
    expect_resumed(case, case.played(2, channels=both)[0], both)
    one, other = (
        case.played(1, engine, case.plain, channels=[Half()])[0] for engine in (InProcess, Batched)
    )
    expect_same(memories(one), memories(other), "in_process", "batched", 0.01)


def order(case: Case) -> None:
    """Playing nodes in another order changes nothing."""
    one, log = case.straight
    other, other_log = case.played(engine=Backwards)
    expect_same(memories(one), memories(other), "the first client first", "the last client first")
    if scores(log) != scores(other_log):
        raise Differs("scores depend on the order in which clients are played")


def part_time(case: Case) -> None:
    """One client awake, half, one away for rounds, one absent in mid-round: all work."""
    _, away, absent, *_ = case.world.clients
    for sampling, rounds in ((Sample(count=1), ROUNDS), (Sample(share=0.5), 3)):
        engine, _ = case.played(rounds, sampling=sampling)
        expect_finite(engine, f"with {sampling}")
    acting = [step for step in case.method.each_round() if step.place is Place.CLIENTS]

    def gone(_: Method, step: str, round: int, node: str) -> str | None:
        here = (node, round) == (absent, 2) and acting and step == acting[0].name
        return "no answer" if here else None

    engine, log = case.played(absences=gone, sampling=Scripted({2: [away], 3: [away]}))
    expect_finite(engine, f"without {absent} in round 2 and {away} in rounds 2 and 3")
    if ("absent" in {note.kind for note in log.notes}) != bool(acting):
        raise Differs(f"the logbook does not say that {absent} was absent in round 2")


def empty_client(case: Case) -> None:
    """A client without a single example takes part, alone in a round too, and harms nobody."""
    *others, last = case.world.clients
    party = case.world.party(last)
    nothing = party.data.subset(torch.zeros(0, dtype=torch.long))
    parties = {name: case.world.party(name) for name in case.world.clients}
    parties[last] = Party(nothing, party.test, party.model)
    world = World(parties, case.world.server_model, case.world.public)
    engine, log = case.played(2, world=world, sampling=Scripted({1: others}))
    expect_finite(engine, f"where {last} has no examples and is alone in round 1")
    if not scores(log):
        raise Differs("nothing was scored")


def wire(case: Case) -> None:
    """Every message and memory survives the codec; floats counted are those of the fields."""
    engine = case.overheard
    for message in [each for _, _, _, each in engine.said]:
        expect_same_after_the_wire(message, case.method)
        for name in (each.name for each in fields(message)):
            value, floats = getattr(message, name), message.floats()
            if isinstance(value, Tensor) and floats[name] not in (0, value.numel()):
                raise Differs(
                    f"{type(message).__name__}.{name} has {value.numel()} entries and is "
                    f"counted as {floats[name]} floats"
                )
    for state in engine.states.values():
        if state is not None:
            expect_same_after_the_wire(state, case.method)
    for where, rows in engine.counted().items():
        said = sum(sum(each.floats().values()) for *at, each in engine.said if tuple(at) == where)
        if rows != said:
            raise Differs(f"{where[2]} said {said} floats in {where[1]}, {rows} were counted")


def content(case: Case) -> None:
    """What clients and server send is accepted; each field of it lied about is refused.

    On arrival, or by the step that reads it, if only that can see it (`Node.reject`). Whether the
    message goes to the server or to a client, and whichever field it is: another shape, another
    type, a name missing, a name more, numbers out of range, 1e30, NaN.
    """
    engine = case.overheard
    for (step, _), (round, sender, hearer, message) in engine.first.items():
        reader = engine.experiment.reader(hearer, round)
        why = refusal(case.method, reader, sender, message)
        if why:
            raise Differs(f"{step}: {hearer} refuses what {sender} honestly sent: {sender} {why}")
        for lie in lies(message):
            if refusal(case.method, reader, sender, lie.message) or engine.rejects(
                message, lie.message
            ):
                continue
            raise Differs(
                f"{type(message).__name__}.{lie.field}, sent in {step}: {lie.what} is not "
                "refused. Say in its hint what may stand there, e.g. Annotated[Tensor, "
                'Axes("public", "class")] (see core.content), or in Method.wrong; what only the '
                "step that reads it can see, that rejects: node.reject(sender, why)"
            )


def walls(case: Case) -> None:
    """Each client a site behind encoded bytes, nobody else's data in reach: the same numbers.

    What is logged and what travels is that of one process, evaluation included.
    """
    _, log = case.played(2, scores="own")
    apart = MemoryLog()
    with behind_walls(case.method, case.world, rounds=2) as engine:
        run(engine, apart)
    for here, there in zip(written(log), written(apart), strict=True):
        for one, other in zip_longest(here, there):
            if one != other:
                raise Differs(f"in one process {one or 'nothing'}; apart {other or 'nothing'}")
    if bool(engine.scoring_bytes) != (case.method.scored is Place.SERVER):
        raise Differs(f"{engine.scoring_bytes} bytes of models travelled to be scored")


def privacy(case: Case) -> None:
    """No message holds a training example, unless the method says so (`sends_examples`)."""
    shown = shown_examples(case.overheard, case.world)
    if shown and not case.method.sends_examples:
        raise Differs(f"{shown[0]} holds a training example, and sends_examples is False")
    if case.method.sends_examples and not shown:
        raise Differs("sends_examples is True, but no message holds a training example")


def budget(case: Case) -> str:
    """With `[privacy]` clients spend what was planned and add noise; or a step is refused."""
    try:
        uses = planned_uses(case.method, case.world)
    except Unprivate as error:
        return f"refused: {error}"
    expect_as_planned(case.method, case.world, uses)
    expect_noise(case.method, case.world, uses)
    return summed_up(uses)


def learning(case: Case) -> None:
    """After ten rounds the mean accuracy is well above chance."""
    log = case.after_ten
    last = [value for (round, *_), value in scores(log).items() if round == 10]
    classes = next(iter(case.world.models.values())).classes
    mean, least = sum(last) / len(last), 1 / classes + 0.2
    if not mean > least:
        raise Differs(
            f"the mean accuracy is {mean:.3f}, expected above {least:.3f}; its values may be too "
            "little for ten rounds, e.g. a low rate"
        )


Check = Callable[[Case], str | None]
CHECKS: dict[str, Check] = {
    "plan": plan,
    "purity": purity,
    "repeat": repeat,
    "engines agree": engines_agree,
    "compiled": compiled,
    "resume": resume,
    "channels": channels,
    "order": order,
    "part-time": part_time,
    "empty client": empty_client,
    "wire": wire,
    "content": content,
    "walls": walls,
    "privacy": privacy,
    "budget": budget,
    "learning": learning,
}


@contextmanager
def _advising(advice: str) -> Iterator[None]:
    """What differs inside is told with what to look for."""
    try:
        yield
    except Differs as error:
        raise Differs(f"{error}. {advice}") from error


def _said(log: MemoryLog) -> list[tuple[Any, ...]]:
    """Who said what to how many."""
    return [(row.round, row.step, row.sender, row.field, row.hearers) for row in log.messages]


def _documented(kind: type) -> bool:
    """Whether a class has a docstring; a dataclass without one is given its signature."""
    text = (kind.__doc__ or "").strip()
    return bool(text) and not text.startswith(f"{kind.__name__}(")


def _told(error: Exception) -> str:
    """What went wrong, as said to people."""
    text = str(error) if isinstance(error, FedstillError) else f"{type(error).__name__}: {error}"
    unsaid = isinstance(error, BadMessage) and "another network" in text and SAID_BY not in text
    return f"{text}. {SAID_BY}" if unsaid else text
