"""Node: draws by purpose, and what an inbox promises."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from fedstill.core.data import Data
from fedstill.core.errors import ProtocolError, SealedData
from fedstill.core.node import Inbox, Node
from fedstill.core.release import Spending, Terms, Use
from fedstill.core.secret import Secret
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
    one.seal(Terms(1.0, 1.0, 1, 2.0, None), granted)
    one.spend(Use("class sums", 4))
    one.reject("c7", "sent nonsense")
    assert one.rejected == {"c7": "sent nonsense"}
    assert one.numbers == {"loss": 2.0, "steps": 3}
    assert [(row.mechanism, row.sigma, row.releases) for row in one.spent] == [
        ("class sums", 2.0, 4)
    ]


def granted(round: int, step: str, use: Use, earlier: Sequence[Spending]) -> Spending:
    """A ledger that grants everything, with noise 2."""
    sigma = 2.0 if use.sigma is None else use.sigma
    return Spending(round, step, "c1", use.mechanism, sigma, use.rate, use.releases)


def test_sealed_examples_are_counted_but_not_read() -> None:
    data = Data.of(torch.zeros(3, 4), torch.tensor([0, 2, 2]))
    one = Node("c1", 1, None, model=MLP((4,), 3), data=data)
    one.seal(Terms(1.0, 1.0, 1, 2.0, None), granted)
    assert len(one.data) == 3 and one.data.counts(3).tolist() == [1, 0, 2]
    for read in (
        lambda: one.data.take(torch.tensor([0])),
        lambda: one.data.labels,
        lambda: one.data.batches(2, one.rng("order")),
        lambda: one.data.all(),
        lambda: one.data.by_class(3),
        lambda: one.data.digest(),
        lambda: one.data + data,
    ):
        with pytest.raises(SealedData, match="sealed"):
            read()
    assert one.spend(Use("class sums")) is data


def test_private_counts_are_noisy_always_the_same_and_paid_for_once_in_a_step() -> None:
    data = Data.of(torch.zeros(300, 4), torch.arange(300) % 2)
    one = Node("c1", 1, None, model=MLP((4,), 3), data=data)
    one.seal(Terms(1.0, 1.0, 1, 2.0, 10.0), granted)
    told = one.data.counts(3)
    assert told.tolist() == one.data.counts(3).tolist() != [150, 150, 0]
    assert (told - torch.tensor([150, 150, 0])).abs().max() < 60  # six deviations
    assert int(told.min()) >= 0 and len(one.data) == int(told.sum())
    assert [(row.mechanism, row.sigma) for row in one.spent] == [("class counts", 10.0)]


def test_a_secret_depends_on_a_key_that_the_seed_does_not_tell() -> None:
    model = MLP((4,), 3)

    def secret(key: bytes | None, seed: int = 0, round: int = 1, *, once: bool = False) -> Secret:
        one = Node("c1", round, None, model=model, seed=seed, key=key)
        return one.secret("noise", once=once)

    assert secret(b"a") == secret(b"a") != secret(b"b")
    assert secret(b"a", seed=1) == secret(b"a", seed=2)  # the recipe's seed says nothing of it
    assert secret(b"a", round=2) != secret(b"a")
    assert secret(b"a", round=2, once=True) == secret(b"a", once=True)
    assert secret(None, seed=1) != secret(None, seed=2)  # simulated: drawn from the seed


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


def test_after_every_release_a_secret_is_another_one() -> None:
    one = Node("c1", 1, None, model=MODEL, data=Data.of(torch.zeros(3, 4), torch.arange(3)))
    one.seal(Terms(1.0, 1.0, 1, 2.0, None), granted)
    before = one.secret("noise")
    assert one.secret("noise") == before
    one.spend(Use("class sums", 2))
    after = one.secret("noise")
    again = Node("c1", 1, None, model=MODEL, data=Data.of(torch.zeros(3, 4), torch.arange(3)))
    again.seal(Terms(1.0, 1.0, 1, 2.0, None), granted, released=2)
    assert before != after == again.secret("noise")  # a step that is played twice in a round


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("most", [0, 2**24])
def test_noise_is_the_same_wherever_a_node_computes(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedstill.core.node.PINNED", most)
    here, there = (Node("c0", 1, None, model=MODEL, device=device) for device in ("cpu", "cuda"))
    assert torch.equal(here.noise("start", 40, 50), there.noise("start", 40, 50).cpu())
    assert there.noise("start", 0, 3).shape == (0, 3)
