"""Networks of sequences: recurrent layers, transformers, and tokens that are looked up."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import worlds
from fedstill.core.errors import BadValue, StepError
from fedstill.core.mechanism import per_example
from fedstill.core.seeds import generator
from fedstill.data import Iid, split
from fedstill.engines.execution import Execution
from fedstill.engines.play.batched import Batched
from fedstill.federation.clock import Clock
from fedstill.federation.experiment import Experiment
from fedstill.federation.population import Population
from fedstill.methods import METHODS
from fedstill.methods.fedavg import FedAvg
from fedstill.models import Module
from fedstill.privacy.privacy import Privacy
from fedstill.runs.run import run
from fedstill.testing import small
from models.test_module_in_methods import pictures

HERE = Execution(device="cpu")
TOKENS, LENGTH = 20, 6


class Recurrent(nn.Module):
    """Rows of an 8x8 image one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(8, 8, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x.squeeze(1))[0][:, -1])  # type: ignore[no-any-return]


class Gated(Recurrent):
    """The same with another layer, which on the host has other rules without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.GRU(8, 8, batch_first=True)  # type: ignore[assignment]


class Stepwise(Recurrent):
    """The same row by row, from a start that it makes itself, wherever it is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.GRUCell(8, 8)  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        state = torch.zeros(len(x), 8)
        for row in x.squeeze(1).unbind(1):
            state = self.layer(row, state)
        return self.head(state)  # type: ignore[no-any-return]


class Transformer(nn.Module):
    """Rows of an 8x8 image that look at each other, as torch's own layer does it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x.squeeze(1)).mean(1))  # type: ignore[no-any-return]


class Causal(nn.Module):
    """Rows of an 8x8 image that look at those before, by a mask of scores that is kept."""

    def __init__(self) -> None:
        super().__init__()
        self.seen, self.head = nn.Linear(8, 8), nn.Linear(8, 3)
        self.mask: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        rows = self.seen(x.squeeze(1))
        scores = rows @ rows.mT
        if self.mask is None or self.mask.shape != scores.shape:
            self.mask = torch.ones_like(scores).triu(1) * -1e9
        return self.head(((scores + self.mask).softmax(2) @ rows).mean(1))  # type: ignore[no-any-return]


class Careful(nn.Module):
    """Asks for the value of a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x / 10 if x.abs().max() > 1000 else x)  # type: ignore[no-any-return]


class Spectral(nn.Module):
    """Begins with what numpy computes, where no gradient goes."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(LENGTH // 2 + 1, 3)

    def forward(self, x: Tensor) -> Tensor:
        found = np.abs(np.fft.rfft(x.numpy())).astype(np.float32)
        return self.head(torch.from_numpy(found))  # type: ignore[no-any-return]


class Words(nn.Module):
    """Looks tokens up as one does with whole numbers."""

    def __init__(self, rows: int = TOKENS) -> None:
        super().__init__()
        self.words = nn.Embedding(rows, 4, padding_idx=0, sparse=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.words(x).mean(1))  # type: ignore[no-any-return]


class Padded(nn.Module):
    """Words that look at each other; 0 fills the end of a text."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(TOKENS + 2, 8, padding_idx=0)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1)  # on the host drops what is padding
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        padding = x == 0
        seen = self.encoder(self.words(x), src_key_padding_mask=padding)
        kept = seen.masked_fill(padding.unsqueeze(2), 0.0)
        return self.head(kept.sum(1))  # type: ignore[no-any-return]


def texts(**options: Any) -> Any:
    """Tokens of three classes, each of which likes tokens of its own."""
    rng = np.random.default_rng(0)
    labels = np.arange(60) % 3
    tokens = 1 + 6 * labels[:, None] + rng.integers(0, 7, (60, LENGTH))
    return split(tokens, labels, partition=Iid(3), **options)


@pytest.mark.parametrize("net", [Recurrent, Transformer])
@pytest.mark.parametrize(
    "name", ["fedavg", "feddm", "feddualmatch", "fedlgd", "dynafed", "dfrd", "dense", "fedftg"]
)
def test_sequences_of_numbers_train_without_a_warning(
    name: str, net: Callable[[], nn.Module]
) -> None:
    with warnings.catch_warnings(action="error"):
        _, log = worlds.played(small(METHODS[name]), pictures(net), rounds=1)
    assert log.metrics  # scored to its end


class Asked(nn.GRU):
    """Notes whether cuDNN would be asked, and how often weights were moved in memory."""

    asked: ClassVar[list[bool]] = []
    moved: ClassVar[list[None]] = []

    def forward(self, *args: Any) -> Any:  # type: ignore[override]
        self.flatten_parameters()
        self.asked.append(torch.backends.cudnn.enabled)
        return super().forward(*args)

    def flatten_parameters(self) -> None:
        self.moved.append(None)


class Asking(Recurrent):
    def __init__(self) -> None:
        super().__init__()
        self.layer = Asked(8, 8, batch_first=True)  # type: ignore[assignment]


def test_cudnn_is_asked_for_what_it_knows_alone() -> None:
    """It has no gradient at rest, none of a gradient, and no stacks; and weights are not its."""
    model = Module((1, 8, 8), 3, Asking)
    weights, x = model.init(0), torch.randn(4, 1, 8, 8)
    Asked.asked.clear()
    Asked.moved.clear()
    model.train({})(weights, x)
    model(weights, x)
    with torch.no_grad():
        model(weights, x)
    torch.func.grad(lambda moved: model.train({})(moved, x).sum())(weights)
    assert Asked.asked == [True, False, True, False]
    assert torch.backends.cudnn.enabled and not Asked.moved


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("net", [Recurrent, Gated])
def test_recurrent_layers_have_every_gradient_on_a_gpu_too(net: Callable[[], nn.Module]) -> None:
    model = Module((1, 8, 8), 3, net)
    start, x = model.init(0), torch.randn(4, 1, 8, 8)

    def slopes(device: str) -> list[Tensor]:
        weights = {name: tensor.to(device).requires_grad_() for name, tensor in start.items()}
        seen, moving = x.to(device).requires_grad_(), list(weights.values())
        loss = model(weights, seen).square().sum()
        first = torch.autograd.grad(loss, [seen, *moving], create_graph=True)
        length = torch.stack([slope.square().sum() for slope in first]).sum()
        second = torch.autograd.grad(length, [seen, *moving])
        trained = model.train({})(weights, seen).square().sum()
        return [one.cpu() for one in (*first, *second, *torch.autograd.grad(trained, moving))]

    for found, wanted in zip(slopes("cuda"), slopes("cpu"), strict=True):
        assert torch.allclose(found, wanted, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize(("name", "clock"), [("feddualmatch", None), ("fedavg", Clock(speed=1e6))])
def test_what_a_network_makes_within_a_pass_lies_where_its_shapes_are_asked_for(
    name: str, clock: Clock | None
) -> None:
    _, log = worlds.played(small(METHODS[name]), pictures(Stepwise), rounds=1, clock=clock)
    assert log.metrics


def test_sums_of_such_a_network_are_released_with_noise() -> None:
    method = METHODS["feddm"](**{**METHODS["feddm"].presets["small"], "start": "noise"})
    _, log = worlds.played(method, pictures(Stepwise), rounds=1, privacy=Privacy(8.0, 1e-3))
    assert log.privacy and log.metrics


@pytest.mark.parametrize("options", [{}, {"bidirectional": True, "num_layers": 2}])
@pytest.mark.parametrize("layer", [nn.RNN, nn.GRU])
def test_recurrent_layers_have_gradients_of_single_examples(
    layer: type[nn.RNNBase], options: dict[str, Any]
) -> None:
    class Read(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer(8, 5, batch_first=True, **options)
            self.head = nn.Linear(10 if options else 5, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.layer(x.squeeze(1))[0][:, -1])  # type: ignore[no-any-return]

    model = Module((1, 8, 8), 3, Read).train()
    weights = model.init(0)
    x = torch.randn(4, 1, 8, 8, generator=generator(0, "sequences"))

    def loss_on(x: Tensor) -> Callable[[Any], tuple[Tensor, dict[str, Tensor]]]:
        return lambda weights: (model(weights, x).square().sum(), {})

    found, _ = per_example(loss_on, weights, x)
    for place in range(4):
        alone, _ = torch.func.grad(loss_on(x[place : place + 1]), has_aux=True)(weights)
        assert all(torch.allclose(found[n][place], alone[n], atol=1e-6) for n in weights)


def test_a_recurrent_network_trains_with_privacy() -> None:
    method, privacy = small(METHODS["fedavg"]), Privacy(8.0, 1e-3)
    _, log = worlds.played(method, pictures(Gated), rounds=1, privacy=privacy)
    assert log.privacy and log.metrics


def test_sums_of_a_network_that_knows_no_stacks_at_rest_are_released_one_by_one() -> None:
    method = METHODS["feddm"](**{**METHODS["feddm"].presets["small"], "start": "noise"})
    given: Any = {"rounds": 1, "privacy": Privacy(8.0, 1e-3)}
    _, stacked = worlds.played(method, pictures(Gated), engine=Batched, **given)
    _, plain = worlds.played(method, pictures(Gated), **given)
    assert stacked.privacy == plain.privacy


def test_what_a_module_kept_of_a_stack_is_not_asked_for_later() -> None:
    _, log = worlds.played(small(METHODS["dfrd"]), pictures(Causal), rounds=1)
    assert log.metrics


@pytest.mark.parametrize("name", ["dfrd", "dense"])
def test_teachers_that_know_no_stack_at_rest_are_asked_one_by_one(name: str) -> None:
    _, log = worlds.played(small(METHODS[name]), pictures(Gated), rounds=1)
    assert log.metrics


def test_a_stack_of_gated_networks_may_look_at_a_shared_one_at_rest() -> None:
    experiment = Experiment(small(METHODS["moon"]), pictures(Gated), rounds=2)
    made = [
        run(experiment, execution=Execution(device="cpu", engine=engine))
        for engine in ("in_process", "batched", "batched")
    ]
    losses = [one.series("loss", step="update") for one in made]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)
    assert losses[1] == losses[2]


@pytest.mark.parametrize(
    ("net", "shape", "chosen"),
    [
        (nn.Linear(4, 3), (4,), "batched"),
        (Careful, (4,), "in_process"),
        (Recurrent, (1, 8, 8), "in_process"),
        (Gated, (1, 8, 8), "batched"),
        (Causal, (1, 8, 8), "in_process"),
        (Words, (LENGTH,), "batched"),
    ],
    ids=["matrices", "values", "recurrent", "gated", "causal", "words"],
)
def test_the_engine_that_is_chosen_can_play_the_network(
    net: Any, shape: tuple[int, ...], chosen: str
) -> None:
    assert HERE.engine_name([Module(shape, 3, net)]) == chosen


@pytest.mark.parametrize("engine", ["in_process", "batched"])
def test_tokens_are_learned_from(engine: str) -> None:
    population = Population(texts(normalise=None), Words)
    experiment = Experiment(FedAvg(lr=1.0, batch_size=8, epochs=5), population, rounds=3)
    made = run(experiment, execution=Execution(device="cpu", engine=engine))
    assert made.summary["average_accuracy"] > 0.8
    net, tokens = made.model().module(), torch.tensor([[1, 2, 3, 1, 2, 3]])
    assert torch.equal(net(tokens), made.model()(tokens.float())), "it takes whole numbers itself"


@pytest.mark.filterwarnings("ignore:.*nested tensors")  # torch's own, once
@pytest.mark.parametrize("engine", ["in_process", "batched"])
def test_texts_of_different_lengths_are_learned_from_with_a_mask(engine: str) -> None:
    rng = np.random.default_rng(0)
    labels = np.arange(60) % 3
    tokens = 1 + 7 * labels[:, None] + rng.integers(0, 7, (60, LENGTH))
    tokens[np.arange(LENGTH) >= rng.integers(2, LENGTH + 1, (60, 1))] = 0
    population = Population(split(tokens, labels, partition=Iid(3), normalise=None), Padded)
    experiment = Experiment(FedAvg(lr=0.1, batch_size=8, epochs=5), population, rounds=3)
    made = run(experiment, execution=Execution(device="cpu", engine=engine))
    assert made.summary["average_accuracy"] > 0.8


@pytest.mark.parametrize("name", ["feddm", "feddualmatch", "fedlgd", "dynafed", "desa"])
def test_methods_that_make_examples_by_gradients_refuse_tokens(name: str) -> None:
    population = Population(texts(normalise=None), Words)
    with pytest.raises(BadValue, match="no gradient reaches the inputs of Words"):
        Experiment(small(METHODS[name]), population)


def test_a_network_that_asks_numpy_trains_where_examples_stay_as_they_are() -> None:
    population = Population(texts(), Spectral)
    made = run(Experiment(FedAvg(), population, rounds=1), execution=HERE)
    assert "average_accuracy" in made.summary
    with pytest.raises(BadValue, match=r"no gradient reaches the inputs of Spectral.*numpy"):
        Experiment(small(METHODS["feddm"]), population)


def test_tokens_that_were_normalised_are_refused_with_what_to_say() -> None:
    with pytest.raises(BadValue, match=r"Words looks its inputs up .*; say normalise=None"):
        Population(texts(), Words)


def test_tokens_beyond_the_embedding_are_told_of() -> None:
    population = Population(texts(normalise=None), Module((LENGTH,), 3, Words(10)))
    with pytest.raises(StepError, match="tokens are whole numbers from 0 below 10"):
        run(Experiment(FedAvg(), population, rounds=1), execution=HERE)
