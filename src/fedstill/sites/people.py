"""Who exists, seen from one place: names and networks of all, the data of one party or of none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from fedstill.core.data import Data
from fedstill.core.errors import SiteError
from fedstill.core.model import Model
from fedstill.core.node import SERVER
from fedstill.core.records import NodeId
from fedstill.federation.population import Party, Population


class OnePlace(Population):
    """A population as one party sees it; whoever asks for another's data gets an error."""

    def __init__(
        self,
        models: Mapping[NodeId, Model],
        server_model: Model,
        *,
        parties: Mapping[NodeId, Party] | None = None,
        public: Data | None = None,
    ):
        self._everybody = dict(models)
        self._here = {SERVER: Party(Data(), Data(), server_model), **(parties or {})}
        self._public = Data() if public is None else public

    @property
    def clients(self) -> Sequence[NodeId]:
        return tuple(self._everybody)

    @property
    def models(self) -> Mapping[NodeId, Model]:
        return self._everybody

    @property
    def public(self) -> Data:
        return self._public

    @property
    def common_test(self) -> Data | None:
        return None

    @property
    def notes(self) -> list[str]:
        return []

    def party(self, node: NodeId) -> Party:
        """The server, or whoever is here."""
        if node not in self._here:
            raise SiteError(f"the data of {node} are at its own site, not here")
        return self._here[node]

    def on(self, device: torch.device | str) -> OnePlace:
        """The same with the data that are here on a device."""
        moved = {
            name: Party(party.data.to(device), party.test.to(device), party.model)
            for name, party in self._here.items()
            if name != SERVER
        }
        server = self._here[SERVER].model
        return OnePlace(self._everybody, server, parties=moved, public=self._public.to(device))
