"""Population: who exists, with data, tests and networks, made on demand; no state.

Of a client that sleeps there are a name, the numbers of its rows and a network's description,
which clients of one kind share.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from functools import cached_property

import torch
from numpy.typing import NDArray

from fedstill.core.data import Data, Pool, Rows
from fedstill.core.model import Model
from fedstill.core.node import SERVER
from fedstill.core.records import NodeId
from fedstill.data.sites import Collection, Examples, Site, Statistics
from fedstill.data.unlabelled import Unlabelled
from fedstill.engines.engine import Party

MOST_PARTIES = 1024  # made and kept; of those beyond, the ones asked for last
Key = tuple[int, Statistics | None, Statistics | None]  # a stored set, its mean and deviation


class Population:
    """A collection's sites as parties on a device. Each stored set is moved there once."""

    def __init__(
        self,
        collection: Collection,
        models: Mapping[NodeId, Model],
        server_model: Model,
        *,
        device: torch.device | str = "cpu",
        public: Unlabelled | None = None,
    ):
        self.collection = collection
        self.device = torch.device(device)
        self.models: Mapping[NodeId, Model] = models
        self.public = Data() if public is None else self._unlabelled(public)
        self._server = Party(Data(), Data(), server_model)
        self._sites = {site.name: site for site in collection.sites}
        self._clients = tuple(self._sites)
        self._learning: Mapping[NodeId, Data] = {}  # instead of the sites' examples
        self._pools: dict[Key, Pool] = {}
        self._tests: dict[Key, Data] = {}
        self._parties: dict[NodeId, Party] = {}

    @property
    def clients(self) -> Sequence[NodeId]:
        return self._clients

    @cached_property
    def common_test(self) -> Data | None:
        """The test set of all clients, or None where there are several."""
        first, *others = self._sites.values()
        key = _key(first.test, first)
        return self._test(first) if all(_key(site.test, site) == key for site in others) else None

    def party(self, node: NodeId) -> Party:
        """The server, or a client; an unknown name is a KeyError."""
        if node == SERVER:
            return self._server
        party = self._parties.pop(node, None) or self._made(node)
        self._parties[node] = party  # the one asked for last comes last
        if len(self._parties) > MOST_PARTIES:
            del self._parties[next(iter(self._parties))]
        return party

    def learning_from(self, data: Mapping[NodeId, Data]) -> Population:
        """The same people with other training examples; tests and networks stay."""
        twin = copy(self)
        twin._learning, twin._parties = data, {}
        return twin

    def _made(self, node: NodeId) -> Party:
        site = self._sites[node]
        data = self._learning.get(node)
        if data is None:
            data = Data((Rows(self._pool(site.pool, site), self._rows(site.rows)),))
        return Party(data, self._test(site), self.models[node])

    def _test(self, site: Site) -> Data:
        """The test set; the very same object for all clients that share it."""
        key = _key(site.test, site)
        if key not in self._tests:
            self._tests[key] = self._pool(site.test, site).all()
        return self._tests[key]

    def _pool(self, examples: Examples, site: Site) -> Pool:
        key = _key(examples, site)
        if key not in self._pools:
            axes = examples.inputs.ndim
            self._pools[key] = Pool(
                torch.from_numpy(examples.inputs).to(self.device),
                torch.from_numpy(examples.labels).to(self.device),
                self._statistics(site.mean, axes),
                self._statistics(site.std, axes),
            )
        return self._pools[key]

    def _unlabelled(self, public: Unlabelled) -> Data:
        axes = public.inputs.ndim
        return Data.unlabelled(
            torch.from_numpy(public.inputs).to(self.device),
            self._statistics(public.mean, axes),
            self._statistics(public.std, axes),
        )

    def _statistics(self, values: Statistics | None, axes: int) -> torch.Tensor | None:
        """A number for each channel, or each feature, as it goes with inputs of so many axes."""
        if values is None:
            return None
        return torch.tensor(values, device=self.device).reshape(-1, *[1] * (axes - 2))

    def _rows(self, rows: NDArray) -> torch.Tensor:  # type: ignore[type-arg]
        return torch.from_numpy(rows).to(self.device)


def _key(examples: Examples, site: Site) -> Key:
    return id(examples), site.mean, site.std
