"""Node: draws by purpose, and what an inbox promises."""

from __future__ import annotations

import pytest
import torch

from fedstill.core.data import Data
from fedstill.core.errors import ProtocolError
from fedstill.core.node import Inbox, Node
from fedstill.models import MLP

MODEL = MLP((4,), 3, hidden=())


def node(id: str = "c0", round: int = 1, step: str = "update", seed: int = 0) -> Node[None]:
    return Node(id, round, None, model=MODEL, step=step, seed=seed)


def test_a_draw_depends_on_seed_round_step_node_and_purpose() -> None:
    drawn = [
        node().draw("order"),
        node(seed=1).draw("order"),
        node(round=2).draw("order"),
        node(step="learn").draw("order"),
        node("c1").draw("order"),
        node().draw("start"),
        node().draw("order", shared=True),
    ]
    assert len(set(drawn)) == len(drawn)


def test_a_draw_does_not_depend_on_what_was_drawn_before() -> None:
    one = node()
    one.rng("start")
    one.draw("other")
    assert one.draw("order") == node().draw("order")


def test_a_shared_draw_is_the_same_for_everybody_but_not_for_every_step() -> None:
    assert node("c0").draw("weights", shared=True) == node("c1").draw("weights", shared=True)
    assert node("c0").draw("weights", shared=True) == node("server").draw("weights", shared=True)
    assert node(round=1).draw("w", shared=True) != node(round=2).draw("w", shared=True)
    assert node(step="a").draw("w", shared=True) != node(step="b").draw("w", shared=True)


def test_a_node_named_like_everybody_does_not_share_its_draws() -> None:
    assert node("everybody").draw("order") != node("c0").draw("order", shared=True)


def test_a_generator_repeats_its_draw() -> None:
    first, again = (torch.rand(4, generator=node().rng("order")) for _ in range(2))
    assert torch.equal(first, again)
    assert not torch.equal(first, torch.rand(4, generator=node("c1").rng("order")))


def test_noise_is_drawn_for_a_purpose_and_moves_no_global_generator() -> None:
    before = torch.get_rng_state()
    noise = node().noise("start", 2, 3)
    assert noise.shape == (2, 3)
    assert torch.equal(noise, torch.randn(2, 3, generator=node().rng("start")))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_server_without_data_has_empty_data_and_hears_of_no_models() -> None:
    server = node("server")
    assert len(server.data) == len(server.public) == 0
    assert isinstance(server.data, Data)
    assert server.models == {}


def test_numbers_spendings_and_rejections_are_kept_until_the_step_ends() -> None:
    one = node()
    one.log(loss=1.0, steps=3)
    one.log(loss=2.0)
    one.spend("noise")
    one.reject("c7", "sent nonsense")
    assert one.rejected == {"c7": "sent nonsense"}
    assert one.numbers == {"loss": 2.0, "steps": 3}
    assert one.spent == ["noise"]


def test_an_inbox_is_in_the_order_of_the_senders_names() -> None:
    inbox = Inbox({"c2": "two", "c10": "ten", "c1": "one"})
    assert list(inbox) == ["c1", "c10", "c2"]
    assert list(inbox.values()) == ["one", "ten", "two"]
    assert inbox["c10"] == "ten"


def test_an_inbox_does_not_change_with_the_mapping_it_was_made_of() -> None:
    messages = {"c1": "one"}
    inbox = Inbox(messages)
    messages["c2"] = "two"
    assert list(inbox) == ["c1"]


def test_the_only_message_is_given_when_there_is_one() -> None:
    assert Inbox({"server": "down"}).only() == "down"


def test_an_inbox_without_exactly_one_message_says_who_was_heard() -> None:
    with pytest.raises(ProtocolError, match="heard from nobody"):
        Inbox().only()
    with pytest.raises(ProtocolError, match="heard from a, b"):
        Inbox({"b": 1, "a": 2}).only()


def test_a_party_can_be_seen_with_another_memory_and_all_else_is_shared() -> None:
    one = node()
    other = one.remembering("notes")
    other.log(loss=1.0)
    other.reject("c1", "mumbled")
    assert (one.state, other.state) == (None, "notes")
    assert one.numbers == {"loss": 1.0} and one.rejected == {"c1": "mumbled"}
    assert other.draw("order") == one.draw("order")
