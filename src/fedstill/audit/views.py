"""What an attacker sees of a federation, as one number for each record; no guesses.

Models are asked for the record; weights that a client sends are asked too; of synthetic sets the
mean embedding and the nearest image are compared with it, and a network is trained on them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from fedstill.core import Data, Inbox
from fedstill.core.data import Batch
from fedstill.core.model import Model
from fedstill.core.node import SERVER
from fedstill.core.records import Message, NodeId, Pictured, Weights
from fedstill.core.seeds import draw
from fedstill.engines import scoring
from fedstill.engines.engine import Act
from fedstill.engines.execution import Execution
from fedstill.engines.play.in_process import InProcess
from fedstill.engines.play.together import Together
from fedstill.federation.experiment import Experiment
from fedstill.methods.local import Local

Values = npt.NDArray[np.float64]
CHUNK = 1000  # records that a network sees at once
NETWORKS = 4  # random ones of the attacker's own, for embeddings
FARTHEST = 1e4  # stands for the distance where a set has no image of a class
SERVERS_MODEL = "server's model"
OWN_MODEL = "own model"
OWN_UPLOAD = "own upload"
EMBEDDING = "set: mean embedding"
NEAREST = "set: nearest image"
TRAINED = "set: network trained on it"


def margins(logits: Tensor, labels: Tensor) -> Tensor:
    """[record], log p(label) - log(1 - p(label)), which is nearly normal over training runs."""
    logs = logits.double().log_softmax(-1)
    own = logs.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    label = F.one_hot(labels, logits.shape[-1]).bool()
    return own - logs.masked_fill(label, -math.inf).logsumexp(-1)


@torch.no_grad()
def asked(answer: Callable[[Tensor], Tensor], records: Batch) -> Values:
    """[record], the margins of a model's answers."""
    parts = zip(torch.split(records.x, CHUNK), torch.split(records.y, CHUNK), strict=True)
    found = torch.cat([margins(answer(x), y) for x, y in parts])
    return found.cpu().numpy().astype(np.float64)


@dataclass(frozen=True, eq=False)
class Records:
    """A client's records that are guessed about, as its network sees them."""

    client: NodeId
    batch: Batch
    tests: Batch  # other examples of the same client, which nobody trains on
    model: Model
    networks: Sequence[tuple[Weights, Tensor]] = ()  # with the records' embeddings, of length one

    @classmethod
    def of(cls, client: NodeId, records: Data, tests: Data, model: Model, seed: int) -> Records:
        """Records with their embeddings under networks that the attacker draws."""
        batch, known = records.all(), []
        with torch.no_grad():
            for number in range(NETWORKS):
                weights = model.init(draw(seed, "audit", "embedding", number))
                parts = [model.features(weights, x).flatten(1) for x in torch.split(batch.x, CHUNK)]
                known.append((weights, F.normalize(torch.cat(parts), dim=1)))
        tested = tests.all() if len(tests) else Batch(batch.x[:0], batch.y[:0])
        return cls(client, batch, tested, model, known)


@dataclass(eq=False)
class Listener:
    """Hears what one federation's audited clients send, and keeps what it says of records."""

    records: Sequence[Records]
    uploads: dict[NodeId, Weights] = field(default_factory=dict)
    sets: dict[NodeId, Pictured] = field(default_factory=dict)
    embedding: dict[NodeId, Values] = field(default_factory=dict)
    nearest: dict[NodeId, Values] = field(default_factory=dict)

    def __call__(self, message: Message, sender: NodeId, round: int) -> None:
        for known in self.records:
            if known.client == sender:
                self._heard(message, known)

    def _heard(self, message: Message, known: Records) -> None:
        client, weights = known.client, getattr(message, "weights", None)
        if isinstance(weights, dict) and fits(known.model, weights):
            self.uploads[client] = weights
        shown = message.pictures()
        if shown is None or not len(shown[0]) or shown[0].shape[1:] != known.batch.x.shape[1:]:
            return
        self.sets[client] = shown
        before = self.embedding.get(client)
        mean = mean_embedding(known, shown)
        self.embedding[client] = mean if before is None else before + mean
        near, closest = nearest_image(known, shown), self.nearest.get(client)
        self.nearest[client] = near if closest is None else np.maximum(near, closest)


def fits(model: Model, weights: Weights) -> bool:
    """Whether these are weights of a network."""
    wanted = {name: law.shape for name, law in model.initial().items()}
    return {name: tuple(tensor.shape) for name, tensor in weights.items()} == wanted


@torch.no_grad()
def mean_embedding(known: Records, shown: Pictured) -> Values:
    """[record], how far the mean of a set's images of its class points to the record."""
    images, labels = shown
    total = torch.zeros(len(known.batch.y), device=known.batch.x.device)
    for weights, own in known.networks:
        outputs = known.model.features(weights, images).flatten(1)
        share = F.one_hot(labels, known.model.classes).to(outputs)  # [image, class]
        means = share.T @ outputs / share.sum(0).clamp(min=1).unsqueeze(1)
        total += (own * means[known.batch.y]).sum(1)
    return total.cpu().numpy().astype(np.float64)


@torch.no_grad()
def nearest_image(known: Records, shown: Pictured) -> Values:
    """[record], minus the distance to the nearest image of the record's class."""
    images, labels = shown
    apart = torch.cdist(known.batch.x.flatten(1), images.flatten(1).to(known.batch.x))
    apart = apart.masked_fill(known.batch.y.unsqueeze(1) != labels, FARTHEST)
    return -apart.min(1).values.clamp(max=FARTHEST).cpu().numpy().astype(np.float64)


Seen = tuple[NodeId, str, Values, Values]
"""Whose records, what is looked at, and the statistic of the records and of test examples."""


def of_models(engine: InProcess, records: Sequence[Records]) -> Iterator[Seen]:
    """What every scored model of a federation says of each client's records."""
    experiment = engine.experiment
    method, clients = experiment.method, experiment.population.clients
    for holder in scoring.holders(method, engine.states, clients):
        if engine.states.is_blank(holder):
            continue
        node = engine.node(holder, experiment.rounds, scoring.EVALUATION)
        if holder == SERVER:
            node.state = method.scored_state(node)
        for known in records:
            if holder == SERVER:
                view = SERVERS_MODEL
            else:
                view = OWN_MODEL if holder == known.client else f"model of {holder}"
            answer = partial(method.predict, node)
            yield known.client, view, asked(answer, known.batch), asked(answer, known.tests)


def of_messages(listener: Listener) -> Iterator[Seen]:
    """What the messages of a client say of its records."""
    nothing = np.zeros(0)
    for known in listener.records:
        client = known.client
        if client in listener.uploads:
            answer = partial(known.model, listener.uploads[client])
            yield client, OWN_UPLOAD, asked(answer, known.batch), asked(answer, known.tests)
        if client in listener.sets:
            yield client, EMBEDDING, listener.embedding[client], nothing
            yield client, NEAREST, listener.nearest[client], nothing


def of_trained(
    listeners: Sequence[Listener],
    experiments: Sequence[Experiment],
    execution: Execution,
    epochs: int,
) -> Iterator[tuple[int, Seen]]:
    """What networks trained on the sets that clients sent last say, by the federation's place."""
    method = Local(lr=0.01, momentum=0.9, epochs=epochs, batch_size=32)
    (learn,) = method.each_round()
    for known in listeners[0].records:
        places = [place for place, heard in enumerate(listeners) if known.client in heard.sets]
        if not places:
            continue
        made = [
            Experiment(
                method,
                experiments[place].population.learning_from(
                    {known.client: Data.of(*listeners[place].sets[known.client])}
                ),
                seed=experiments[place].seed,
            )
            for place in places
        ]
        together = Together(made, execution)
        together.play({i: Act(learn, 1, {known.client: Inbox()}) for i in range(len(places))})
        for place, engine in zip(places, together.engines, strict=True):
            weights = getattr(engine.memory(known.client), "weights", {})
            answer = partial(known.model, weights)
            said = asked(answer, known.batch), asked(answer, known.tests)
            yield place, (known.client, TRAINED, *said)
