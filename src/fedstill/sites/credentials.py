"""Where a party's key and certificates lie; nothing is read here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Credentials:
    """The files of one party of a run; its name is that of its certificate."""

    folder: Path
    name: str

    @property
    def authority(self) -> Path:
        """The certificate that signs all others of the run."""
        return self.folder / "ca.crt"

    @property
    def key(self) -> Path:
        """The private key; it never leaves the folder."""
        return self.folder / f"{self.name}.key"

    @property
    def certificate(self) -> Path:
        """What the authority has signed for this party."""
        return self.folder / f"{self.name}.pem"
