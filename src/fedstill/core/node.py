"""Node, Inbox, Addressed: all that a step may touch; nothing made here is global."""

from __future__ import annotations

import hmac
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from typing import Generic, Protocol, TypeVar, cast

import torch
from torch import Generator, Tensor

from fedstill.core import seeds
from fedstill.core.data import Data, Sealed
from fedstill.core.errors import BadValue, ProtocolError
from fedstill.core.model import Model
from fedstill.core.records import NodeId, Record
from fedstill.core.release import Grant, Spending, Terms, Use
from fedstill.core.secret import Secret
from fedstill.core.work import Work

SERVER: NodeId = "server"
NOTHING = Data()
COUNT_BITS = 40  # of the noise of counts before it is rounded
COUNTS = "class counts"  # the mechanism that tells how many examples of each class there are
PINNED = 2**24  # numbers of noise at most that the host keeps where a GPU reads by itself

S = TypeVar("S")
T = TypeVar("T")
M = TypeVar("M")
R = TypeVar("R", bound=Record)


class Inbox(Mapping[NodeId, M], Generic[M]):
    """The messages that reached a node, in the order of the senders' names."""

    def __init__(self, messages: Mapping[NodeId, M] | None = None):
        self._messages = dict(sorted((messages or {}).items()))

    def __getitem__(self, sender: NodeId) -> M:
        return self._messages[sender]

    def __iter__(self) -> Iterator[NodeId]:
        return iter(self._messages)

    def __len__(self) -> int:
        return len(self._messages)

    def only(self) -> M:
        """The single message; an error when there is none or more than one."""
        if len(self) != 1:
            senders = ", ".join(self) or "nobody"
            raise ProtocolError(f"expected one message, heard from {senders}")
        return next(iter(self._messages.values()))


class Addressed(dict[NodeId, M], Generic[M]):
    """A different message for each hearer."""


class Cache(Protocol):
    """Results worth keeping between runs, by a key that says what made them."""

    def key(self, made_by: str) -> str:
        """The key of what is made so, and rounded as it is here."""

    def find(self, key: str, kind: type[R]) -> R | None: ...

    def keep(self, key: str, record: Record) -> None: ...


class Node(Generic[S]):
    """A party as a step sees it: its memory, data, model and randomness.

    Public knowledge are the clients' architectures (`models`), the server's (`server_model`), and
    who is joined with whom (`graph`).
    """

    def __init__(
        self,
        id: NodeId,
        round: int,
        state: S,
        *,
        model: Model,
        data: Data | None = None,
        public: Data | None = None,
        models: Mapping[NodeId, Model] | None = None,
        server_model: Model | None = None,
        graph: Mapping[NodeId, Sequence[NodeId]] | None = None,
        seed: int = 0,
        step: str = "",
        again: int = 0,
        device: torch.device | str = "cpu",
        cache: Cache | None = None,
        key: bytes | None = None,
    ):
        self.id = id
        self.round = round
        self.state = state
        self.model = model
        self.data = data or NOTHING
        self.public = public or NOTHING
        self.models = models or {}
        self.server_model = model if server_model is None else server_model
        self.graph = graph or {}
        self.device = torch.device(device)
        self.cache = cache
        self.numbers: dict[str, float | Tensor] = {}
        self.privacy: Terms | None = None
        self.spent: list[Spending] = []
        self.rejected: dict[NodeId, str] = {}
        self.work: Work | None = None  # of its loops, where the engine counts them
        self._seed = seed
        self._step = step
        # What tells draws of one purpose apart: how often the step was played before in its round,
        # then which time a part of it came (`anew`).
        self._times: tuple[str, ...] = (f"again {again}",) if again else ()
        self._parts: Counter[str] = Counter()
        self._loops = 0
        self._key = key
        self._records = self.data
        self._grant: Grant | None = None
        self._released = 0

    def draw(self, purpose: str, *, shared: bool = False) -> int:
        """A number for one purpose in this step and round; `shared` draws are everybody's.

        In a step that is listed twice in a round, the second time it is another one.
        """
        who = "everybody" if shared else f"node:{self.id}"
        where: tuple[seeds.Name, ...] = (self.round, self._step, *self._times)
        return seeds.draw(self._seed, "draw", *where, who, purpose)

    def anew(self, part: str) -> Node[S]:
        """This party, for a part of a step that may come several times, such as a training.

        The first time it is this very node; then one that draws other numbers for every purpose.
        Its draws are all that it is for: what the party remembers is set on the node itself.
        """
        self._parts[part] += 1
        if self._parts[part] == 1:
            return self
        other = copy(self)
        other._times = (*self._times, f"{part} {self._parts[part]}")
        return other

    def next_loop(self) -> int:
        """A number for what the network of the step's next loop draws, such as dropout."""
        self._loops += 1
        return self.draw(f"network of loop {self._loops}")

    def rng(self, purpose: str, *, shared: bool = False) -> Generator:
        """A generator on the host for one purpose."""
        return seeds.generator(self.draw(purpose, shared=shared))

    def noise(self, purpose: str, *shape: int) -> Tensor:
        """Standard normal numbers, drawn on the host, placed where this node computes."""
        # Where a GPU can read it without a copy on the host, and nobody waits for that.
        pinned = self.device.type == "cuda" and 0 < math.prod(shape) <= PINNED
        drawn = torch.randn(shape, generator=self.rng(purpose), pin_memory=pinned)
        return drawn.to(self.device, non_blocking=pinned)

    def remembering(self, state: T) -> Node[T]:
        """This party with another memory, as a step of another method is to see it.

        All else is shared: what it logs and rejects, this node has logged and rejected.
        """
        other = cast(Node[T], copy(self))
        other.state = state
        return other

    def log(self, **numbers: float | Tensor) -> None:
        """Numbers for the logbook; a tensor of one element is moved to the host after the step."""
        for name, number in numbers.items():
            if not hasattr(number, "__float__"):
                raise BadValue(f"log: {name} = {number!r}: must be a number, or a tensor of one")
            if isinstance(number, Tensor) and number.numel() != 1:
                came = f"a tensor of shape {list(number.shape)}"
                raise BadValue(f"log: {name} is {came}; log one number, e.g. its mean")
        self.numbers.update(numbers)

    def reject(self, sender: NodeId, why: str) -> None:
        """A message that this step cannot use and goes on without; the run stops or notes it."""
        self.rejected[sender] = why

    def seal(self, terms: Terms, grant: Grant, released: int = 0) -> None:
        """Keep the examples closed from now on, but for uses that the ledger grants.

        `released` is how often they were used before, in earlier steps.
        """
        self.privacy, self._grant, self._released = terms, grant, released
        self.data = Sealed(self._told_counts, self._records.normalisation)

    def spend(self, use: Use) -> Data:
        """The examples, for a use that the ledger grants and writes down; else an error.

        Where nothing is private, just the examples.
        """
        if self._grant is not None:
            self.spent.append(self._grant(self.round, self._step, use, self.spent))
        return self._records

    @property
    def private(self) -> bool:
        """Whether anything is promised of the examples: the papers' mechanism promises nothing."""
        return self.privacy is not None and not self.privacy.paper

    @property
    def records(self) -> Data:
        """The examples for steps that no mechanism guards: sealed where they are private."""
        return self.data if self.private else self._records

    def secret(self, purpose: str, *, once: bool = False) -> Secret:
        """Draws of noise that nobody else may know, for one purpose in this step and round.

        After every release it is another one, so that no noise is used twice. At a site it is made
        with a key that never leaves it. In a simulation it is drawn from the recipe's seed, so
        whoever knows that can take the noise away: such noise is simulated. With `once` it is the
        same in every step and round.
        """
        released = self._released + sum(row.releases for row in self.spent)
        where: tuple[seeds.Name, ...] = ("always",)
        if not once:
            where = (self.round, self._step, *self._times, released)
        if self._key is None:
            return Secret(seeds.draw(self._seed, "secret", *where, f"node:{self.id}", purpose))
        text = repr((*where, self.id, purpose)).encode()
        return Secret(hmac.digest(self._key, text, "sha256"))

    def _told_counts(self) -> Tensor:
        """[class], how many examples of each class, as others may know it."""
        exact = self._records.counts(self.model.classes)
        noise = None if self.privacy is None else self.privacy.counts_sigma
        if noise is None:
            return exact
        if self._grant is not None and not any(row.mechanism == COUNTS for row in self.spent):
            row = self._grant(self.round, self._step, Use(COUNTS, sigma=noise), self.spent)
            if row.releases:  # told in an earlier step already: the very same noise again
                self.spent.append(row)
        drawn = self.secret(COUNTS, once=True).whole(torch.empty(exact.shape), COUNT_BITS)
        # A whole number is added to a whole number: no last bit tells what the noise was added to.
        rounded = (drawn.double() * (noise * 2.0**-COUNT_BITS)).round().long()
        return (exact + rounded).clamp(min=0)
