"""Population: who exists, with data, tests and networks, made on demand; no state.

Of a client that sleeps there are a name, the numbers of its rows and a network's description,
which clients of one kind share.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn

from fedstill.core.data import Data, Pool, Rows
from fedstill.core.errors import BadValue, unknown
from fedstill.core.model import Model
from fedstill.core.node import SERVER
from fedstill.core.precision import other_defaults
from fedstill.core.records import NodeId
from fedstill.data.sites import Collection, Examples, Site, Statistics
from fedstill.data.unlabelled import Unlabelled
from fedstill.models import as_model

MOST_PARTIES = 1024  # made and kept; of those beyond, the ones asked for last
Key = tuple[str, int, Statistics | None, Statistics | None]  # device, set, mean, deviation
Networked = Model | nn.Module | Callable[..., Any]  # see `models.as_model`


@dataclass(frozen=True, eq=False)
class Party:
    """What a node holds from the beginning: data to learn from and to be tested on, a network."""

    data: Data
    test: Data
    model: Model


class Population:
    """Everybody's data and networks.

    `data` are the clients' (from `fedstill.split`, `fedstill.clients` or `fedstill.load`).
    `network` is everybody's: any `torch.nn.Module`, its class or a function that builds one, or a
    network of fedstill or its class. Single clients may have others, by name in `networks`, and the
    server too. `public` is what everybody holds besides, without labels.

        Population(data, Net)  # see models.Module for what else may be said of one
        Population(data, partial(ConvNet, width=32), networks={"clinic": MLP})

    A subclass that holds its parties otherwise gives `clients`, `models`, `public`, `party` and
    `common_test`, and `on` where its data can be moved.
    """

    data: Collection | None = None  # where the parties' data come from one
    unlabelled: Unlabelled | None = None

    def __init__(
        self,
        data: Collection,
        network: Networked,
        *,
        networks: Mapping[NodeId, Networked] | None = None,
        server: Networked | None = None,
        public: Unlabelled | None = None,
    ):
        if not isinstance(data, Collection):
            raise BadValue(
                f"data must be what fedstill.split(x, y, partition=…), clients or load gives, not "
                f"a {type(data).__name__}"
            )
        if wrong := other_defaults():
            raise BadValue(wrong)
        _check_public(public, data)
        self.data = data
        self.device = torch.device("cpu")
        self.unlabelled = public
        self._sites = {site.name: site for site in data.sites}
        self._clients = tuple(self._sites)
        self._models = self._made_models(data, network, networks or {})
        common = network if server is None else server
        self._server = Party(Data(), Data(), fitted(common, data))
        self._learning: Mapping[NodeId, Data] = {}  # instead of the sites' examples
        self._pools: dict[Key, Pool] = {}
        self._tests: dict[Key, Data] = {}
        self._parties: dict[NodeId, Party] = {}
        self._elsewhere: dict[str, Population] = {}

    @property
    def clients(self) -> Sequence[NodeId]:
        """The clients' names."""
        return self._clients

    @property
    def models(self) -> Mapping[NodeId, Model]:
        """Every client's network."""
        return self._models

    @property
    def networks(self) -> set[Model]:
        """Every network that there is."""
        return {self.party(SERVER).model, *self.models.values()}

    @cached_property
    def public(self) -> Data:
        """What everybody holds, without labels."""
        return Data() if self.unlabelled is None else public_on(self.unlabelled, self.device)

    @cached_property
    def common_test(self) -> Data | None:
        """The test set of all clients, or None where there are several."""
        first, *others = self._sites.values()
        key = self._key(first.test, first)
        alike = all(self._key(site.test, site) == key for site in others)
        return self._test(first) if alike else None

    @property
    def notes(self) -> list[str]:
        """What a reader must know of the data before comparing numbers."""
        own = [] if self.data is None else [*self.data.notes]
        return own + public_notes(self.unlabelled, self.data)

    def party(self, node: NodeId) -> Party:
        """The server, or a client; an unknown name is a KeyError."""
        if node == SERVER:
            return self._server
        party = self._parties.pop(node, None) or self._made(node)
        self._parties[node] = party  # the one asked for last comes last
        if len(self._parties) > MOST_PARTIES:
            del self._parties[next(iter(self._parties))]
        return party

    def on(self, device: torch.device | str) -> Population:
        """The same parties with their data on a device; each stored set is moved there once."""
        wanted = torch.device(device)
        if wanted == self.device:
            return self
        if str(wanted) not in self._elsewhere:
            twin = self._twin()
            twin.device = wanted
            self._elsewhere[str(wanted)] = twin
        return self._elsewhere[str(wanted)]

    def learning_from(self, data: Mapping[NodeId, Data]) -> Population:
        """The same parties with other training examples; tests and networks stay."""
        twin = self._twin()
        twin._learning = data
        return twin

    def _twin(self) -> Population:
        """The same, with parties of its own; stored sets are shared."""
        twin = copy(self)
        twin._parties, twin._elsewhere = {}, {}
        for made in ("public", "common_test"):
            twin.__dict__.pop(made, None)
        return twin

    def _made_models(
        self, data: Collection, common: Networked, own: Mapping[NodeId, Networked]
    ) -> Mapping[NodeId, Model]:
        strangers = [name for name in own if name not in self._sites]
        if strangers:
            raise BadValue(
                ["networks: " + unknown("client", str(n), self._sites) for n in strangers]
            )
        made: dict[int, Model] = {}  # clients of one kind share a description
        for network in (*([common] if len(own) < len(self) else []), *own.values()):
            if id(network) not in made:
                made[id(network)] = fitted(network, data)
        return {name: made[id(own.get(name, common))] for name in self._clients}

    def __len__(self) -> int:
        return len(self.clients)

    def __repr__(self) -> str:
        titles = ", ".join(sorted({model.title for model in self.networks}))
        return f"<{type(self).__name__} of {len(self)} with {titles}; data: {self.data}>"

    def _made(self, node: NodeId) -> Party:
        if node not in self._sites:
            raise KeyError(unknown("party", str(node), (SERVER, *self._sites)))
        site = self._sites[node]
        data = self._learning.get(node)
        if data is None:
            rows = torch.from_numpy(site.rows).to(self.device)
            data = Data((Rows(self._pool(site.pool, site), rows),))
        else:
            data = data.to(self.device)
        return Party(data, self._test(site), self.models[node])

    def _test(self, site: Site) -> Data:
        """The test set; the very same object for all clients that share it."""
        key = self._key(site.test, site)
        if key not in self._tests:
            self._tests[key] = self._pool(site.test, site).all()
        return self._tests[key]

    def _pool(self, examples: Examples, site: Site) -> Pool:
        key = self._key(examples, site)
        if key not in self._pools:
            axes = examples.inputs.ndim
            self._pools[key] = Pool(
                torch.from_numpy(examples.inputs).to(self.device),
                torch.from_numpy(examples.labels).to(self.device),
                self._statistics(site.mean, axes),
                self._statistics(site.std, axes),
            )
        return self._pools[key]

    def _statistics(self, values: Statistics | None, axes: int) -> torch.Tensor | None:
        """A number for each channel, or each feature, as it goes with inputs of so many axes."""
        return _by_channel(values, axes, self.device)

    def _key(self, examples: Examples, site: Site) -> Key:
        return str(self.device), id(examples), site.mean, site.std


def fitted(network: Networked, data: Collection) -> Model:
    """A network for these examples; one for others is refused."""
    try:
        model = as_model(network, tuple(data.shape), data.classes)
    except BadValue as error:
        lines = [f"networks: {line}" for line in error.faults]
        raise BadValue([*lines, *_from_one(data)]) from error
    if model.tokens and any(site.mean is not None for site in data.sites):
        raise BadValue(
            f"networks: {model.title} looks its inputs up in an embedding, but the data are "
            "normalised, so that they are no whole numbers; say normalise=None where they are made"
        )
    return model


def _from_one(data: Collection) -> list[str]:
    """A line where labels seem to count from one, so that there is a class more than meant."""
    if data.classes == 1 or data.class_names[0] != "0":
        return []
    if any((labels == 0).any() for s in data.sites for labels in (s.labels, s.test.labels)):
        return []
    return [
        f"networks: no example has the label 0 of {data.classes} classes, which count from 0; "
        "where yours count from 1, use y - 1"
    ]


def _check_public(public: Unlabelled | None, data: Collection) -> None:
    """Refuse public data that are none, or that the clients' networks cannot take."""
    if public is None:
        return
    if not isinstance(public, Unlabelled):
        raise BadValue(
            f"public must be what fedstill.unlabelled(x) gives, not a {type(public).__name__}"
        )
    if public.inputs.shape[1:] != tuple(data.shape):
        theirs, ours = ("x".join(map(str, one)) for one in (public.inputs.shape[1:], data.shape))
        raise BadValue(f"public: inputs are of {theirs}, but those of the clients are of {ours}")


def public_on(public: Unlabelled | None, device: torch.device | str) -> Data:
    """Examples without labels as every party holds them."""
    if public is None:
        return Data()
    mean, std = (_by_channel(v, public.inputs.ndim, device) for v in (public.mean, public.std))
    return Data.unlabelled(torch.from_numpy(public.inputs).to(device), mean, std)


def _by_channel(
    values: Statistics | None, axes: int, device: torch.device | str
) -> torch.Tensor | None:
    if values is None:
        return None
    found = torch.tensor(values, dtype=torch.float32, device=device)
    return found.reshape(-1, *[1] * (axes - 2))


def public_notes(public: Unlabelled | None, data: Collection | None) -> list[str]:
    """What a reader must know of the public images."""
    if public is None:
        return []
    same = f"public: {public.name} is also what the clients hold, so images may be their own"
    return [*public.notes, *([same] if data is not None and public.name == data.name else [])]
