"""A method whose clients' records are private: whether it does what was planned for it."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from fedstill.core.errors import BadValue, StepError
from fedstill.core.method import Method
from fedstill.core.records import Message, NodeId
from fedstill.core.release import Use
from fedstill.engines.execution import Execution
from fedstill.federation.budget import planned
from fedstill.federation.run import run
from fedstill.logbook.writer import MemoryLog
from fedstill.privacy.ledger import BudgetSpent
from fedstill.privacy.privacy import Plan, Privacy
from fedstill.privacy.summary import by_node
from fedstill.testing import worlds
from fedstill.testing.closely import Differs, Heard, shown_examples
from fedstill.testing.worlds import World

ASKED = Privacy(4.0, 1e-3, releases=2)
REFUSED = "cannot be private as it stands: its step"
ADVICE = "what is asked of records may depend on neither their values nor what was learned of them"
Rows = list[tuple[str, int, float]]  # mechanism, releases and rate of each use
Uses = dict[NodeId, list[Use]]


def expect_as_planned(method: Method, world: World, rounds: int) -> None:
    """What each client spends in some rounds is what was rehearsed; or the method is refused.

    Nothing is added as noise, so no accountant is needed: whatever is not planned is too much.
    """
    uses = _planned(method, world, rounds)
    if uses is None:
        return
    asked = replace(ASKED, plan=Plan(dict.fromkeys(uses, 0.0), uses))
    try:
        engine, log = worlds.played(method, world, rounds, Heard, privacy=asked)
    except StepError as error:
        if not isinstance(error.__cause__, BudgetSpent):
            raise
        raise Differs(
            f"{error.step} of {error.node} asks more of records in round {error.round} than was "
            f"planned; {ADVICE}"
        ) from error
    for where in shown_examples(engine, world):
        raise Differs(f"with [privacy], {where} holds a training example")
    rows = by_node(log.privacy)
    spent: dict[NodeId, Rows] = {
        client: [(row.mechanism, row.releases, row.rate) for row in rows.get(client, [])]
        for client in uses
    }
    for client, own in uses.items():
        wanted: Rows = [(use.mechanism, use.releases, use.rate) for use in own]
        if spent[client] != wanted:
            raise Differs(
                f"{client} was planned to spend {_told(wanted)}, but spent {_told(spent[client])}; "
                f"{ADVICE}"
            )


def expect_noise(method: Method, world: World) -> None:
    """Whatever a client's records change in its messages, other noise changes too.

    One round is played as it is, with another record in the place of the first client's first one,
    and a few times with other noise. How many records there are of each class is public.
    """
    uses = _planned(method, world, 1)
    if uses is None:
        return
    asked = replace(ASKED, plan=Plan(dict.fromkeys(uses, 1.0), uses))
    client = next(iter(world.clients))

    def said(world: World, key: bytes) -> list[tuple[str, dict[str, Any]]]:
        engine = worlds.engine_for(method, world, Heard, 1, privacy=asked)
        engine.key = key
        run(engine, MemoryLog())
        return [(step, _numbers(message)) for _, step, who, message in engine.said if who == client]

    plain, other = said(world, b"one"), said(_with_another_record(world, client), b"one")
    # Whole numbers, such as guessed classes, may be what they were by chance: noise is drawn often.
    noisy = [said(world, key) for key in (b"two", b"three", b"four")]
    for (step, numbers), (_, of_others), *again in zip(plain, other, *noisy, strict=False):
        for name in numbers:
            told = _differ(numbers, of_others, name)
            if told and not any(_differ(numbers, with_noise, name) for _, with_noise in again):
                raise Differs(
                    f"with [privacy], {name}, which {client} sent in {step}, depends on single "
                    "records and has no noise; clip what each record contributes and add noise of "
                    f"node.privacy.sigma times the clip from node.secret('{step}')"
                )


def _planned(method: Method, world: World, rounds: int) -> Uses | None:
    """What each client is to ask of its records; None where the method cannot be private."""
    try:
        return planned(
            worlds.experiment(method, world, rounds, privacy=ASKED), Execution(device="cpu")
        )
    except BadValue as error:
        if REFUSED in str(error):
            return None
        raise


def _with_another_record(world: World, client: NodeId) -> World:
    """The same federation, in which somebody's first record is another one of its class."""
    party = world.party(client)
    own = worlds.alone(party.data)
    if len(own):
        stored = own.parts[0].pool.stored
        stored[0] = 255 - stored[0] if stored.dtype == torch.uint8 else -stored[0]
    parties = {**world.parties, client: replace(party, data=own)}
    return World(parties, world.server_model, world.public)


def _numbers(message: Message) -> dict[str, Any]:
    """Its tensors and plain numbers by name."""
    plain = {f.name: getattr(message, f.name) for f in fields(message)}
    plain = {name: value for name, value in plain.items() if isinstance(value, (int, float))}
    return {**plain, **message.tensors()}


def _differ(one: dict[str, Any], other: dict[str, Any], name: str) -> bool:
    left, right = one[name], other.get(name)
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        return not torch.equal(left, right)
    return left is not right and left != right


def _told(rows: Rows) -> str:
    return ", ".join(f"{releases} x {kind} at rate {rate:g}" for kind, releases, rate in rows) or (
        "nothing"
    )
