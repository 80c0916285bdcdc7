"""What a peer has said and heard: when it comes back, it says and hears the same again.

It goes on from a checkpoint and plays what came after that once more. What it heard the first time
is on its disk, so it comes to the same, whatever others would say now or no longer keep. What it
said is there for those who have not asked for it yet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from torch import Tensor

from fedstill.core.files import write_lasting
from fedstill.core.records import NodeId, Record
from fedstill.engines.ranks.letters import as_bytes, as_tensor
from fedstill.sites.release_log import on_disk
from fedstill.wire import codec

HEARD, SAID = "heard", "said"  # so begin the names of files
Words = Mapping[NodeId, bytes | str]  # of each other peer what it said, or why it was not heard


class Heard(Record):
    """What came from others after an act."""

    words: dict[str, Tensor]
    absent: dict[str, str]


class Said(Record):
    """What an act left for others; a word that several hear is written once."""

    words: tuple[Tensor, ...]
    hearers: dict[str, int]


class Journal:
    """What was said and heard after each act, in files of a folder."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._saved = -1  # the round of the last checkpoint

    def heard(self, round: int, number: int, listen: Callable[[], Words]) -> Words:
        """What was heard after an act, or is now; on the disk when it returns."""
        file = self._file(HEARD, round, number)
        if file.exists():
            kept = codec.load(file, Heard)
            words = {peer: bytes(as_bytes(word)) for peer, word in kept.words.items()}
            return {**words, **kept.absent}
        found = listen()
        spoken = {peer: as_tensor(word) for peer, word in found.items() if isinstance(word, bytes)}
        absent = {peer: word for peer, word in found.items() if isinstance(word, str)}
        self._write(file, Heard(spoken, absent))
        return found

    def say(self, round: int, number: int, words: Mapping[NodeId, bytes]) -> None:
        """Keep what is said after an act; on the disk when it returns."""
        different = list(dict.fromkeys(words.values()))
        hearers = {hearer: different.index(word) for hearer, word in words.items()}
        said = Said(tuple(as_tensor(word) for word in different), hearers)
        self._write(self._file(SAID, round, number), said)

    def said(self) -> Iterator[tuple[int, int, dict[NodeId, bytes]]]:
        """Round, number, and what was said to each, of every act that is kept."""
        for file in sorted(self.folder.glob(f"{SAID}-*")):
            kept = codec.load(file, Said)
            words = [bytes(as_bytes(word)) for word in kept.words]
            yield *_place(file), {hearer: words[at] for hearer, at in kept.hearers.items()}

    def began(self, round: int) -> bool:
        """Whether anything was said or heard in a round, as far as it is kept."""
        return any(any(self.folder.glob(f"{kind}-{round}-*")) for kind in (HEARD, SAID))

    def saved(self, round: int) -> None:
        """Forget what was heard up to the checkpoint before this one."""
        self._forget(HEARD, lambda of: of <= self._saved)
        self._saved = round

    def forget(self, before: int) -> None:
        """Forget what was said in rounds before this one; all may still ask for round 0."""
        self._forget(SAID, lambda of: 0 < of < before)

    def _forget(self, kind: str, over: Callable[[int], bool]) -> None:
        for file in self.folder.glob(f"{kind}-*"):
            if over(_place(file)[0]):
                file.unlink()

    def _file(self, kind: str, round: int, number: int) -> Path:
        return self.folder / f"{kind}-{round}-{number}.safetensors"

    def _write(self, file: Path, record: Record) -> None:
        with on_disk():
            self.folder.mkdir(parents=True, exist_ok=True)
            write_lasting(file, codec.encode(record))


def _place(file: Path) -> tuple[int, int]:
    _, round, number = file.stem.split("-")
    return int(round), int(number)
