"""Data: resident tensors and index plans over them; no files.

Examples lie on the device once, as they are stored (images as bytes). A batch is a row of
indices; it is gathered and normalised when a loop asks for it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, chain, zip_longest
from typing import Any, Generic, NamedTuple, TypeVar, overload

import torch
from torch import Generator, Tensor

from fedstill.core import gpu, trees
from fedstill.core.errors import SealedData
from fedstill.core.torch_internals import is_wrapped

B = TypeVar("B")


class Batch(NamedTuple):
    """Some examples, normalised."""

    x: Tensor  # [example, ...]
    y: Tensor  # [example]


@dataclass(frozen=True, eq=False)
class Pool:
    """Stored examples and how to normalise them: (pixels / 255 - mean) / std for bytes."""

    stored: Tensor  # [example, ...], bytes or floats
    labels: Tensor  # [example]
    mean: Tensor | None = None  # broadcastable to an example
    std: Tensor | None = None

    def take(self, rows: Tensor, *, fleeting: bool = False) -> Batch:
        """The examples at `rows`, which may have any shape."""
        return Batch(self.inputs(rows, fleeting=fleeting), chosen(self.labels, rows))

    def inputs(self, rows: Tensor, *, fleeting: bool = False) -> Tensor:
        """Without labels; fetched and normalised at once where there is a kernel for that.

        What is `fleeting` is read by one step of a loop, and by nobody after it.
        """
        channels = (*self.stored.shape[1:2], 1, 1)
        if (
            self.stored.is_cuda
            and self.stored.dtype == torch.uint8
            and rows.device == self.stored.device
            and not is_wrapped(rows)
            and self.mean is not None
            and self.std is not None
            and self.mean.shape == self.std.shape == channels
            and self.mean.dtype == self.std.dtype == torch.float32
            and (kernels := gpu.kernels("kernels.gather", self.stored)) is not None
            and kernels.takes(self.stored)
        ):
            found: Tensor = kernels.taken(self.stored, rows, self.mean, self.std, fleeting=fleeting)
            return found
        return self.normalised(chosen(self.stored, rows))

    def normalised(self, stored: Tensor) -> Tensor:
        bytes = stored.dtype == torch.uint8
        x = stored.div(255.0) if bytes else stored
        if self.mean is None or self.std is None:
            return x
        return x.sub_(self.mean).div_(self.std) if bytes else (x - self.mean) / self.std

    def all(self) -> Data:
        """Everything in this pool."""
        return Data((Rows(self, torch.arange(len(self.stored), device=self.stored.device)),))

    def to(self, device: torch.device | str) -> Pool:
        moved = [t if t is None else t.to(device) for t in (self.mean, self.std)]
        return Pool(self.stored.to(device), self.labels.to(device), moved[0], moved[1])


def chosen(table: Tensor, rows: Tensor) -> Tensor:
    """table[rows], for rows counted from the front; on a CPU quicker than general indexing."""
    if table.device.type != "cpu":
        return table[rows]
    if rows.dim() == 1:
        return table.index_select(0, rows)
    return table.index_select(0, rows.reshape(-1)).reshape(rows.shape + table.shape[1:])


class Rows(NamedTuple):
    """The examples of one pool that belong to somebody."""

    pool: Pool
    rows: Tensor  # [example], indices into the pool


Gather = Callable[[int, int], list[tuple[list[int], B]]]
"""Of the first so many plans at a step: which plans, and their batches stacked."""


class Batches(Sequence[B], Generic[B]):
    """What each step of a loop sees: has a length, and its items are made on demand."""

    def at(self, step: int) -> B:
        """The batch of a step that there is."""
        raise IndexError(step)

    @overload
    def __getitem__(self, step: int) -> B: ...
    @overload
    def __getitem__(self, step: slice) -> Sequence[B]: ...
    def __getitem__(self, step: int | slice) -> B | Sequence[B]:
        if isinstance(step, slice):
            return [self.at(i) for i in range(*step.indices(len(self)))]
        if not 0 <= step < len(self):
            raise IndexError(step)
        return self.at(step)

    @classmethod
    def together(cls, plans: Sequence[Sequence[B]]) -> Gather[B]:
        """What gathers the batches of several plans, step by step."""
        return lambda active, step: stacked_by_shape([plan[step] for plan in plans[:active]])

    def ahead(self, step: int, count: int) -> B | None:
        """The batches of so many steps from `step` on, stacked along a first axis.

        None where they are not alike, or not made faster together than one by one.
        """
        return None


def stacked_by_shape(items: Sequence[B]) -> list[tuple[list[int], B]]:
    """Items of equal shape stacked along a new first axis, with their places."""
    groups: dict[Any, list[int]] = {}
    for place, item in enumerate(items):
        groups.setdefault(trees.shape(item), []).append(place)
    return [(places, trees.stack([items[i] for i in places])) for places in groups.values()]


@dataclass(frozen=True, eq=False)
class Lazy(Batches[B]):
    """Batches made by a function of the step number; `many` makes those of some steps stacked."""

    steps: int
    make: Callable[[int], B]
    many: Callable[[int, int], B | None] | None = None

    def __len__(self) -> int:
        return self.steps

    def at(self, step: int) -> B:
        return self.make(step)

    def ahead(self, step: int, count: int) -> B | None:
        return self.many(step, count) if self.many is not None else None


@dataclass(frozen=True, eq=False)
class Plan(Batches[Batch]):
    """Indices into a data set, so many for each step; they lie on the host until they are used."""

    data: Data
    order: Tensor = field(repr=False)  # [place], step after step
    sizes: Sequence[int] = field(repr=False)  # how many places each step takes

    def __len__(self) -> int:
        return len(self.sizes)

    @cached_property
    def rows(self) -> Sequence[Tensor]:
        """For each step [example], where the data are."""
        return torch.split(self._placed, list(self.sizes)) if self.sizes else ()

    @cached_property
    def _placed(self) -> Tensor:
        return gpu.sent(self.order, self.data.device)

    @cached_property
    def _begins(self) -> list[int]:
        return list(accumulate(self.sizes, initial=0))

    def at(self, step: int) -> Batch:
        return self.data.take(self.rows[step])

    def ahead(self, step: int, count: int) -> Batch | None:
        sizes = set(self.sizes[step : step + count])
        if len(sizes) != 1:
            return None
        begin, end = self._begins[step], self._begins[min(step + count, len(self))]
        return self.data.take(self._placed[begin:end].reshape(-1, *sizes))

    @classmethod
    def together(cls, plans: Sequence[Sequence[Batch]]) -> Gather[Batch]:
        """One gather a step for all plans that draw as many examples from the same pool."""
        known = [p for p in plans if isinstance(p, Plan) and len(p.data.parts) == 1]
        return Gathering(known) if len(known) == len(plans) else super().together(plans)


class Gathering:
    """Plans that each read one pool; where their examples lie there is looked up once."""

    def __init__(self, plans: Sequence[Plan]):
        parts = [plan.data.parts[0] for plan in plans]
        self.pools = [part.pool for part in parts]
        self.sizes = list(zip_longest(*(plan.sizes for plan in plans)))  # [step][plan]
        self.rows = in_pools(parts, [plan.order for plan in plans])
        # [step, plan], where the rows of a step begin
        begins = list(accumulate(chain.from_iterable(plan.sizes for plan in plans), initial=0))
        ends = accumulate((len(plan) for plan in plans), initial=0)
        own = (begins[end : end + len(p)] for end, p in zip(ends, plans, strict=False))
        places = torch.tensor([*zip_longest(*own, fillvalue=0)], dtype=torch.long)
        self.begins = gpu.sent(places, self.rows.device)
        largest = max(chain([0], *(plan.sizes for plan in plans)))
        self.counts = torch.arange(largest, device=self.rows.device)
        self._grouped: dict[Any, list[tuple[int, list[int]]]] = {}

    def __call__(self, active: int, step: int) -> list[tuple[list[int], Batch]]:
        gathered = []
        for size, places in self._groups(self.sizes[step][:active]):
            begins = self.begins[step]
            if len(places) == active:
                begins = begins[:active]
            else:
                begins = begins[gpu.sent(torch.tensor(places), begins.device)]
            rows = chosen(self.rows, begins.unsqueeze(1) + self.counts[:size])
            gathered.append((places, self.pools[places[0]].take(rows, fleeting=True)))
        return merged(gathered)

    def _groups(self, sizes: tuple[int, ...]) -> list[tuple[int, list[int]]]:
        """Which plans read so many examples of one pool; most steps are like the one before."""
        if sizes not in self._grouped:
            groups: dict[tuple[int, int], list[int]] = {}
            for place, size in enumerate(sizes):
                groups.setdefault((id(self.pools[place]), size), []).append(place)
            self._grouped[sizes] = [(size, places) for (_, size), places in groups.items()]
        return self._grouped[sizes]


def in_pools(parts: Sequence[Rows], orders: Sequence[Tensor]) -> Tensor:
    """The rows in their pools of several parties' examples, one party's after the other's.

    Orders come from the host. A GPU is sent all of them at once, and looks them up at once.
    """
    if parts[0].rows.is_cuda:
        return in_pools_at_once(parts, orders)
    return torch.cat([chosen(p.rows, order) for p, order in zip(parts, orders, strict=True)])


def in_pools_at_once(parts: Sequence[Rows], orders: Sequence[Tensor]) -> Tensor:
    """The same by one table of everybody's rows, one behind the other."""
    tables = {id(part.rows): part.rows for part in parts}
    sizes = accumulate((len(rows) for rows in tables.values()), initial=0)
    first = dict(zip(tables, sizes, strict=False))
    shifts = torch.tensor([first[id(part.rows)] for part in parts])
    lengths = torch.tensor([len(order) for order in orders])
    places = torch.cat(list(orders)) + shifts.repeat_interleave(lengths)
    table = torch.cat(list(tables.values()))
    return table[gpu.sent(places, table.device)]


def merged(groups: Sequence[tuple[list[int], B]]) -> list[tuple[list[int], B]]:
    """Stacked groups of equal shape laid behind each other."""
    kinds: dict[Any, list[tuple[list[int], B]]] = {}
    for places, stacked in groups:
        row = trees.map_tensors(lambda tensor: tensor[0], stacked)
        kinds.setdefault(trees.shape(row), []).append((places, stacked))
    joined = []
    for alike in kinds.values():
        places = [place for group, _ in alike for place in group]
        parts = [stacked for _, stacked in alike]
        whole = (
            parts[0]
            if len(parts) == 1
            else trees.map_tensors(lambda *rows: torch.cat(rows), parts[0], *parts[1:])
        )
        joined.append((places, whole))
    return joined


@dataclass(frozen=True, eq=False)
class Data:
    """A party's examples: parts of one or more resident pools."""

    parts: tuple[Rows, ...] = ()

    @classmethod
    def of(cls, x: Tensor, y: Tensor) -> Data:
        """Examples that are held as they are (already normalised)."""
        return Pool(x, y).all()

    @classmethod
    def unlabelled(
        cls, stored: Tensor, mean: Tensor | None = None, std: Tensor | None = None
    ) -> Data:
        """Examples without classes: each one's label is its place, by which others speak of it."""
        return Pool(stored, torch.arange(len(stored), device=stored.device), mean, std).all()

    def __len__(self) -> int:
        return self._length

    @cached_property
    def _length(self) -> int:
        return sum(len(part.rows) for part in self.parts)

    def __add__(self, other: Data) -> Data:
        return Data(self.parts + other.parts)

    @property
    def device(self) -> torch.device:
        return self.parts[0].rows.device if self.parts else torch.device("cpu")

    def to(self, device: torch.device | str) -> Data:
        """The same examples on a device; these themselves where they lie there already."""
        if not self.parts or self.device == torch.device(device):
            return self
        return Data(tuple(Rows(pool.to(device), rows.to(device)) for pool, rows in self.parts))

    @cached_property
    def labels(self) -> Tensor:
        """[example]"""
        if not self.parts:
            return torch.zeros(0, dtype=torch.long)
        return torch.cat([part.pool.labels[part.rows] for part in self.parts])

    def take(self, index: Tensor) -> Batch:
        """The examples at `index` (any shape), gathered from whichever part holds them."""
        if len(self.parts) == 1:
            return self.parts[0].pool.take(chosen(self.parts[0].rows, index))
        x: Tensor | None = None
        y: Tensor | None = None
        low = 0
        for pool, rows in self.parts:
            if not len(rows):
                continue
            here = (index >= low) & (index < low + len(rows))
            batch = pool.take(rows[(index - low).clamp(0, len(rows) - 1)])
            low += len(rows)
            if x is None or y is None:
                x, y = batch
                continue
            mask = here.reshape(here.shape + (1,) * (batch.x.dim() - here.dim()))
            x, y = torch.where(mask, batch.x, x), torch.where(here, batch.y, y)
        if x is None or y is None:
            raise ValueError(
                "this party has no examples to take; ask len(data) before all(), chunks() or "
                "take() (batches() gives none)"
            )
        return Batch(x, y)

    def inputs(self, index: Tensor, *, fleeting: bool = False) -> Tensor:
        """As `take`, without the labels; `fleeting` as in `Pool.inputs`."""
        if len(self.parts) != 1:
            return self.take(index).x
        pool, rows = self.parts[0]
        return pool.inputs(chosen(rows, index), fleeting=fleeting)

    def all(self) -> Batch:
        """Every example at once."""
        return self.take(torch.arange(len(self), device=self.device))

    def chunks(self, size: int) -> Iterator[Batch]:
        """Every example in order, some at a time."""
        for index in torch.split(torch.arange(len(self), device=self.device), size):
            yield self.take(index)

    def subset(self, index: Tensor) -> Data:
        """The examples at `index`, in that order."""
        if len(self.parts) == 1:
            pool, rows = self.parts[0]
            return Data((Rows(pool, rows[index]),))
        return Data.of(*self.take(index))

    def batches(
        self, size: int, rng: Generator, *, epochs: int = 1, steps: int | None = None
    ) -> Plan:
        """A plan of `epochs` passes, each in an order of its own; the last batch may be smaller.

        With `steps` there are as many passes as so many steps need.
        """
        if not len(self):
            return Plan(self, torch.zeros(0, dtype=torch.long), [])
        if steps is not None:
            epochs = math.ceil(steps / math.ceil(len(self) / size))
        orders = [torch.randperm(len(self), generator=rng) for _ in range(epochs)]
        whole, rest = divmod(len(self), size)
        sizes = ([size] * whole + [rest] * bool(rest)) * epochs
        sizes = sizes[:steps]
        if len(orders) == 1 and len(sizes) == whole + bool(rest):  # all examples once
            return Plan(self, orders[0], sizes)
        none = torch.zeros(0, dtype=torch.long)
        return Plan(self, torch.cat([none, *orders])[: sum(sizes)], sizes)

    def balanced_batches(
        self, size: int, rng: Generator, *, epochs: int = 1, steps: int | None = None
    ) -> Plan:
        """As many batches as `batches` has, of the same sizes; every class is drawn alike.

        Examples are drawn with replacement: first a class that there is, then one of its examples.
        """
        sizes = self.batches(size, rng, epochs=epochs, steps=steps).sizes
        labels = self.labels.cpu()
        held, counts = torch.unique(labels, return_counts=True)
        by_class = torch.argsort(labels, stable=True)
        first = counts.cumsum(0) - counts
        total = sum(sizes)
        if not total:
            return Plan(self, torch.zeros(0, dtype=torch.long), sizes)
        drawn = torch.randint(len(held), (total,), generator=rng)
        share = torch.rand(total, generator=rng, dtype=torch.float64)
        return Plan(self, by_class[first[drawn] + (share * counts[drawn]).long()], sizes)

    @property
    def normalisation(self) -> Pool | None:
        """A pool without examples that normalises as the first one does; None without examples."""
        if not self.parts:
            return None
        pool = self.parts[0].pool
        return Pool(pool.stored[:0], pool.labels[:0], pool.mean, pool.std)

    def digest(self) -> str:
        """The sha256 of these examples as they are stored, their labels and normalisation."""
        found = hashlib.sha256()
        for pool, rows in self.parts:
            for tensor in (pool.stored[rows], pool.labels[rows], pool.mean, pool.std):
                if tensor is not None:
                    found.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
                    found.update(tensor.cpu().contiguous().numpy().tobytes())
        return found.hexdigest()

    def counts(self, classes: int) -> Tensor:
        """[class], how many examples of each class, on the host."""
        return torch.bincount(self.labels.cpu(), minlength=classes)

    def by_class(self, classes: int) -> list[Tensor]:
        """For each class the indices of its examples, on the host."""
        labels = self.labels.cpu()
        return [torch.nonzero(labels == c).flatten() for c in range(classes)]


class Sealed(Data):
    """A party's examples while privacy keeps them closed: how many there are, and nothing else.

    How many of each class is public, or told with noise. A step that needs the examples asks
    `node.spend(use)` for them, which asks the ledger first.
    """

    _counts: Callable[[], Tensor]  # [class], on the host
    _normalisation: Pool | None

    def __init__(self, counts: Callable[[], Tensor], normalisation: Pool | None):
        object.__setattr__(self, "_counts", counts)
        object.__setattr__(self, "_normalisation", normalisation)

    @property
    def parts(self) -> tuple[Rows, ...]:
        raise self._closed()

    def batches(
        self, size: int, rng: Generator, *, epochs: int = 1, steps: int | None = None
    ) -> Plan:
        raise self._closed()

    def _closed(self) -> SealedData:
        return SealedData(
            "it reads examples that [privacy] keeps sealed; a step opens them by node.spend(use) "
            "and lets nothing out but by a mechanism (docs/privacy.md). Use a method that can, run "
            "this one on private virtual data (data.virtual), or leave [privacy] out"
        )

    def __len__(self) -> int:
        return int(self._counts().sum())

    @property
    def device(self) -> torch.device:
        pool = self._normalisation
        return torch.device("cpu") if pool is None else pool.stored.device

    @property
    def normalisation(self) -> Pool | None:
        return self._normalisation

    def counts(self, classes: int) -> Tensor:
        found = self._counts()
        return torch.cat([found, found.new_zeros(max(0, classes - len(found)))])
