"""The option `aggregation`: who has it, what it does to a run with a liar, who refuses it."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, get_args

import pytest
import torch
from tests.worlds import pictures, played, vectors

from fedstill.core import algebra
from fedstill.core.errors import BadValue
from fedstill.core.node import SERVER
from fedstill.core.records import Message
from fedstill.methods import METHODS, FedAvg, FedDM, FedLGD, FedNova, HeteroFL
from fedstill.parts.robust import Rule
from fedstill.testing.closely import memories

FIVE = vectors((20, 20, 20, 20, 20))
LITTLE: dict[str, Any] = {"lr": 0.1, "batch_size": 8}


@dataclass(frozen=True)
class Turned:
    """A client that sends the opposite of what it came to, a hundred times as far."""

    def carry(self, message: Any, sender: str, round: int, step: str) -> Message:
        if sender != "c4":
            return message  # type: ignore[no-any-return]
        return message.replace(weights=algebra.scale(message.weights, -100.0))  # type: ignore[no-any-return]


def weights(method: Any, liar: bool) -> dict[str, torch.Tensor]:
    engine, _ = played(method, FIVE, 2, meddling=[Turned()] if liar else [])
    return engine.states[SERVER].weights  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", [FedAvg, FedNova])
@pytest.mark.parametrize("rule", get_args(Rule))
def test_a_liar_among_five_moves_robust_rules_little(kind: Any, rule: Rule) -> None:
    honest = weights(FedAvg(**LITTLE), False)
    found = weights(kind(**LITTLE, aggregation=rule), True)
    apart = float(algebra.square(algebra.sub(found, honest)).sqrt())
    length = float(algebra.square(honest).sqrt())
    assert apart > 5 * length if rule == "mean" else apart < length, (apart, length)


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("scaffold", "median"),
        ("moon", "geometric_median"),
        ("vhl", "norm_bound"),
        ("fedgen", "trimmed_mean"),
        ("dynafed", "multi_krum"),
        ("feddf", "median"),
        ("fccl", "trimmed_mean"),
        ("fedhe", "geometric_median"),
        ("fedproto", "median"),
        ("desa", "norm_bound"),
        ("fedlgd", "norm_bound"),
        ("feddm", "multi_krum"),
        ("feddualmatch", "multi_krum"),
    ],
)
def test_methods_that_join_what_clients_say_learn_with_a_robust_rule(name: str, rule: str) -> None:
    kind = METHODS[name]
    method = kind(**{**kind.presets["small"], "aggregation": rule})
    rounds = 2 if name == "desa" else 1  # in the first all peers say the same
    found, log = played(method, pictures(), rounds)
    assert not log.notes
    plain, _ = played(kind(**kind.presets["small"]), pictures(), rounds)
    here, there = memories(found), memories(plain)
    same = all(torch.equal(here[node][n], there[node][n]) for node in here for n in here[node])
    assert all(bool(t.isfinite().all()) for node in here.values() for t in node.values())
    # Three clients are too few for Multi-Krum to leave one out.
    assert same == (rule == "multi_krum" and name != "dynafed")


def test_methods_of_which_nothing_is_joined_have_no_such_option() -> None:
    without = {name for name, kind in METHODS.items()
               if "aggregation" not in {f.name for f in fields(kind)}}  # fmt: skip
    assert without == {"local", "centralised", "dfrd", "dense", "fedftg"}


def test_parts_of_networks_and_sets_refuse_what_has_no_meaning_there() -> None:
    with pytest.raises(BadValue, match="only the mean over holders is defined"):
        HeteroFL(aggregation="median")
    with pytest.raises(BadValue, match="known: mean, multi_krum"):
        FedDM(aggregation="median")  # type: ignore[arg-type]
    with pytest.raises(BadValue, match=r'bound = 2\.0: is of aggregation = "norm_bound"'):
        FedAvg(bound=2.0)
    with pytest.raises(BadValue, match=r'bound = 2\.0: is of aggregation = "norm_bound"'):
        FedLGD(bound=2.0)


@pytest.mark.parametrize("kind", [FedDM])
def test_a_set_with_turned_labels_is_left_out(kind: Any) -> None:
    @dataclass(frozen=True)
    class Swapped:
        def carry(self, message: Any, sender: str, round: int, step: str) -> Message:
            if sender != "c4":
                return message  # type: ignore[no-any-return]
            return message.replace(labels=(message.labels + 1) % 3)  # type: ignore[no-any-return]

    world = pictures((20, 20, 20, 20, 20))
    values = {**kind.presets["small"], "steps": 2, "server_epochs": 2}
    told = {"aggregation": "multi_krum", "byzantine": 1}
    lied, _ = played(kind(**values, **told), world, 1, meddling=[Swapped()])
    believed, _ = played(kind(**values), world, 1, meddling=[Swapped()])
    without, _ = played(kind(**values), world, 1, absences=gone)
    one, other, third = (e.states[SERVER].weights for e in (lied, believed, without))
    assert not all(torch.equal(one[name], other[name]) for name in one)
    assert all(torch.isfinite(third[name]).all() for name in third)


def gone(_: Any, step: str, round: int, node: str) -> str | None:
    return "away" if (step, node) == ("synthesize", "c4") else None
