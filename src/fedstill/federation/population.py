"""Population: who exists, with data, tests and networks, made on demand; no state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from numpy.typing import NDArray

from fedstill.core.data import Data, Part, Pool
from fedstill.core.model import Model
from fedstill.core.node import SERVER
from fedstill.core.records import NodeId
from fedstill.data.sites import Collection, Examples, Site
from fedstill.engines.engine import Party


class Population:
    """A collection's sites as parties on a device. Each stored set is moved there once."""

    def __init__(
        self,
        collection: Collection,
        models: Mapping[NodeId, Model],
        server_model: Model,
        *,
        device: torch.device | str = "cpu",
        public: Data | None = None,
    ):
        self.collection = collection
        self.device = torch.device(device)
        self.models: Mapping[NodeId, Model] = models
        self.public = public or Data()
        self._server = Party(Data(), Data(), server_model)
        self._sites = {site.name: site for site in collection.sites}
        self._pools: dict[tuple[int, tuple[float, ...], tuple[float, ...]], Pool] = {}
        self._parties: dict[NodeId, Party] = {}

    @property
    def clients(self) -> Sequence[NodeId]:
        return list(self._sites)

    def party(self, node: NodeId) -> Party:
        """The server, or a client; an unknown name is a KeyError."""
        if node == SERVER:
            return self._server
        if node not in self._parties:
            site = self._sites[node]
            data = Data((Part(self._pool(site.pool, site), self._rows(site.rows)),))
            test = self._pool(site.test, site).all()
            self._parties[node] = Party(data, test, self.models[node])
        return self._parties[node]

    def _pool(self, examples: Examples, site: Site) -> Pool:
        key = (id(examples), site.mean, site.std)
        if key not in self._pools:
            shape = (-1, 1, 1)
            self._pools[key] = Pool(
                torch.from_numpy(examples.images).to(self.device),
                torch.from_numpy(examples.labels).to(self.device),
                torch.tensor(site.mean, device=self.device).reshape(shape),
                torch.tensor(site.std, device=self.device).reshape(shape),
            )
        return self._pools[key]

    def _rows(self, rows: NDArray) -> torch.Tensor:  # type: ignore[type-arg]
        return torch.from_numpy(rows).to(self.device)
