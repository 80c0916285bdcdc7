"""Exchange: bytes to sites and theirs back; what they mean is not known here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from fedstill.core.errors import SiteError
from fedstill.core.records import NodeId


class Stopped(SiteError):
    """Somebody asked the run to stop."""


IN_A_STEP = (
    "stopped before all sites had answered; go on with `fedstill deploy start`: what they have "
    "done meanwhile is not lost"
)

TWICE = "two processes are connected in its name, each with memories of its own; end one of them"


@dataclass(frozen=True)
class Silence:
    """Why a site gave no answer."""

    reason: str
    gone: bool = field(
        default=False, compare=False
    )  # who answers next may be another process, of another version


class Exchange(Protocol):
    """Asks sites and brings their answers.

    That it is really they who answer is its duty. A request may reach a site several times: it
    answers the same again.
    """

    def ask(
        self, requests: Mapping[NodeId, bytes], seconds: float
    ) -> Mapping[NodeId, bytes | Silence]:
        """The answer of each site, in so many seconds for all together; else why there is none.

        Told to stop before all have answered it raises `Stopped`: nobody is absent because of that,
        and who has answered does so again when the run goes on.
        """


class Roster(Protocol):
    """Who is connected."""

    def names(self) -> set[NodeId]:
        """All who are connected."""

    def wait_for(
        self, names: Iterable[NodeId], seconds: float, stopped: Callable[[], bool] = ...
    ) -> set[NodeId]:
        """Wait until all are connected; returns who is still missing after so many seconds."""


class Connection(Exchange, Protocol):
    """An exchange with sites that come and go."""

    @property
    def here(self) -> Roster:
        """Who is connected."""

    def close(self) -> None:
        """Hang up."""


class Loopback:
    """Sites in this very process; bytes go there and back all the same."""

    def __init__(self, sites: Mapping[NodeId, Callable[[bytes], bytes]]):
        self.sites = sites

    def ask(
        self, requests: Mapping[NodeId, bytes], seconds: float
    ) -> Mapping[NodeId, bytes | Silence]:
        """Each site in turn."""
        return {site: self.sites[site](data) for site, data in requests.items()}
