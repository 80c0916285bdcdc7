"""What a saved run consists of; no method knowledge.

A checkpoint is a folder `round-00012` with one file per node that remembers something and a
`checkpoint.json` that lists them with their hashes. It is written under another name and renamed
when all of it is on the disk, so whatever bears the name is whole. Nothing else is stored: every
draw is a function of the seed and of what it is for, so a resumed run is exact.

A memory that is still that of an earlier checkpoint is not written again: the two share the file.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedstill.core.errors import BadValue, RunFolderError, WireError
from fedstill.core.files import sync_folder, write_through
from fedstill.core.records import NodeId, Record, State
from fedstill.wire import codec

FORMAT = 1
INDEX = "checkpoint.json"

# A round that is written again first moves the old folder aside; until the new one has its name,
# the one set aside is the checkpoint of that round.
_NAME = re.compile(r"round-(\d{5,})(\.replaced)?")
_PARTIAL = ".partial"
_REPLACED = ".replaced"
_SAFE = frozenset(b"abcdefghijklmnopqrstuvwxyz0123456789_-")
_LONGEST = 200  # characters of a file name; most file systems take 255

Listed = dict[str, Any]  # of the index: file, sha256 and the memory's class, of one node
Kinds = Mapping[str, type[State]] | Callable[[NodeId], type[State] | None]
"""Which memory a node has: by the name of its class, or by a function of the node."""


class DamagedCheckpoint(RunFolderError):
    """A checkpoint whose files are missing or are not those that were written."""


@dataclass(frozen=True)
class Saved:
    """What a checkpoint held; `notes` says what was passed over to get to it."""

    round: int
    states: MutableMapping[NodeId, State | None]
    extra: dict[str, Any]
    path: Path
    notes: list[str] = field(default_factory=list)


def write(
    folder: Path,
    round: int,
    states: Mapping[NodeId, State | None],
    *,
    digest: str,
    keep: int = 2,
    extra: Mapping[str, Any] | None = None,
    base: Path | None = None,
    changed: Collection[NodeId] = (),
) -> Path:
    """Save what every node remembers after a round, and delete checkpoints beyond the last `keep`.

    `digest` tells this experiment from others; `extra` is anything JSON can hold. Whoever is in
    the checkpoint `base` and not among the `changed` remembers what stands there.
    """
    if keep < 1 or round < 0:
        raise BadValue(f"checkpoint: keep = {keep} must be at least 1, round = {round} at least 0")
    try:
        json.dumps(extra)
    except (TypeError, ValueError) as error:
        raise BadValue(f"checkpoint: extra must be what JSON can hold: {error}") from error
    target = Path(folder) / f"round-{round:05d}"
    draft = _with_suffix(target, _PARTIAL)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _delete(draft)
        draft.mkdir()
        known = _unchanged(draft, base, [node for node in states if node not in changed])
        nodes: dict[NodeId, Listed] = {}
        blank: list[NodeId] = []  # those who have acted and remember nothing
        for node in states:
            if node in known:
                nodes[node] = known[node]
            elif (state := states[node]) is None:
                blank.append(node)
            else:
                nodes[node] = _write_state(draft, node, state)
        index = {
            "format": FORMAT, "round": round, "digest": digest,
            "nodes": nodes, "blank": blank, "extra": dict(extra or {}),
        }  # fmt: skip
        write_through(draft / INDEX, json.dumps(index).encode())
        sync_folder(draft)
        _publish(draft, target)
        _tidy(target, round, keep)
    except OSError as error:
        raise RunFolderError(
            f"cannot write the checkpoint of round {round} to {target}: {_reason(error)}; "
            "check that the folder can be written to and that the disk has room"
        ) from error
    return target


def latest(folder: Path) -> Path | None:
    """The newest complete checkpoint, or None."""
    found = _complete(Path(folder))
    return found[0] if found else None


def reached(folder: Path) -> tuple[int, Mapping[str, Any]] | None:
    """The round of the newest checkpoint, and what was written beside it; none where none is."""
    for path in _complete(Path(folder)):
        with suppress(DamagedCheckpoint):
            index = _index(path)
            return index["round"], index["extra"]
    return None


def digests(folder: Path) -> set[str]:
    """Of which experiments there are checkpoints; damaged ones do not say."""
    found: set[str] = set()
    for path in _complete(Path(folder)):
        with suppress(DamagedCheckpoint):
            found.add(_index(path)["digest"])
    return found


def read(
    path: Path,
    kinds: Kinds,
    *,
    digest: str | None,
    into: MutableMapping[NodeId, State | None] | None = None,
    device: torch.device | str = "cpu",
    held: Sequence[type[Record]] = (),
) -> Saved:
    """What a checkpoint holds, checked against its hashes and, unless None, the digest.

    Memories are read one after the other, onto a device, into the place given for them. What they
    hold in fields of any kind is one of `held`.
    """
    path, states = Path(path), {} if into is None else into
    index = _index(path)
    if digest is not None and index["digest"] != digest:
        raise RunFolderError(
            f"{path} belongs to another experiment (digest {index['digest']}, this one has "
            f"{digest}); resume with the recipe that began it, or give this run a new folder"
        )
    states.clear()
    for node, line in index["nodes"].items():
        states[node] = _read_state(path, node, line, kinds, device, held)
    states.update(dict.fromkeys(index.get("blank", ())))
    return Saved(index["round"], states, index["extra"], path)


def listed(path: Path) -> tuple[int, list[NodeId]]:
    """The round of a checkpoint, and who remembers something in it."""
    index = _index(path)
    return index["round"], [name for name, line in index["nodes"].items() if line["state"]]


def tensors(path: Path, node: NodeId) -> dict[str, Tensor]:
    """What a node remembers, by dotted names, where nobody knows what kind of memory it is."""
    return codec.tensors(_intact(path, _index(path)["nodes"][node]))


def read_latest(
    folder: Path,
    kinds: Kinds,
    *,
    digest: str | None,
    into: MutableMapping[NodeId, State | None] | None = None,
    device: torch.device | str = "cpu",
    held: Sequence[type[Record]] = (),
) -> Saved | None:
    """The newest checkpoint that is not damaged; None where there is no checkpoint at all."""
    notes: list[str] = []
    for path in _complete(Path(folder)):
        try:
            saved = read(path, kinds, digest=digest, into=into, device=device, held=held)
        except DamagedCheckpoint as error:
            notes.append(f"passed over: {error}")
        else:
            return replace(saved, notes=notes)
    if notes:
        raise DamagedCheckpoint(
            f"every checkpoint in {folder} is damaged; start the run again in a new folder\n"
            + "\n".join(notes)
        )
    return None


def _unchanged(draft: Path, base: Path | None, nodes: Iterable[NodeId]) -> dict[NodeId, Listed]:
    """The lines of those whose files could be shared with an earlier checkpoint."""
    if base is None:
        return {}
    try:
        known = _index(base)["nodes"]
    except RunFolderError:
        return {}
    lines = {node: known[node] for node in nodes if node in known and known[node]["file"]}
    return {n: line for n, line in lines.items() if _linked(base / Path(line["file"]).name, draft)}


def _linked(file: Path, folder: Path) -> bool:
    """Give a file a second name in a folder; False where the system cannot."""
    try:
        os.link(file, folder / file.name)
    except OSError:
        return False
    return True


def _write_state(folder: Path, node: NodeId, state: State) -> Listed:
    data = codec.encode(state)
    name = file_name(node)
    write_through(folder / name, data)
    kind = type(state).__name__
    return {"file": name, "sha256": hashlib.sha256(data).hexdigest(), "state": kind}


def _read_state(
    path: Path,
    node: NodeId,
    line: Listed,
    kinds: Kinds,
    device: torch.device | str,
    held: Sequence[type[Record]],
) -> State | None:
    if line["state"] is None:
        return None
    kind = kinds.get(line["state"]) if isinstance(kinds, Mapping) else kinds(node)
    if kind is None or kind.__name__ != line["state"]:
        expected = kind.__name__ if kind else "nothing of that name"
        raise RunFolderError(
            f"{path}: node {node!r} remembers {line['state']}, this method expects {expected}; "
            "resume with the method that wrote it, or start the run again in a new folder"
        )
    data = _intact(path, line)
    try:
        return codec.decode(data, kind, limits=codec.OWN, device=device, held=held)
    except WireError as error:
        raise RunFolderError(
            f"{path / line['file']} is intact, but was written by other code: {error}; resume with "
            "the version that wrote it, or start the run again in a new folder"
        ) from error


def _intact(path: Path, line: Listed) -> bytes:
    """A file of a checkpoint, if it is what was written."""
    file = path / Path(line["file"]).name
    try:
        data = file.read_bytes()
    except FileNotFoundError:
        raise DamagedCheckpoint(f"{path} is damaged: {file.name} is missing") from None
    except OSError as error:
        raise RunFolderError(f"cannot read {file}: {_reason(error)}") from error
    if hashlib.sha256(data).hexdigest() != line["sha256"]:
        raise DamagedCheckpoint(f"{path} is damaged: {file.name} is not what was written")
    return data


def _index(path: Path) -> dict[str, Any]:
    """The list of what a checkpoint holds; its format is checked first."""
    try:
        index = json.loads((path / INDEX).read_bytes())
        version = index["format"]
    except FileNotFoundError:
        raise DamagedCheckpoint(f"{path} is damaged: {INDEX} is missing") from None
    except OSError as error:
        raise RunFolderError(f"cannot read {path / INDEX}: {_reason(error)}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedCheckpoint(f"{path} is damaged: {INDEX}: {error}") from error
    if version != FORMAT:
        raise RunFolderError(
            f"{path} is a checkpoint of format {version}, this fedstill reads format {FORMAT}; "
            "resume with the version that wrote it, or start the run again in a new folder"
        )
    if not _well_formed(index):
        raise DamagedCheckpoint(f"{path} is damaged: {INDEX} lacks what a checkpoint lists")
    return dict(index)


def _well_formed(index: Mapping[str, Any]) -> bool:
    kinds = {"round": int, "digest": str, "nodes": dict, "extra": dict}
    if not all(isinstance(index.get(name), kind) for name, kind in kinds.items()):
        return False
    blank = index.get("blank", [])  # older checkpoints list those nodes among the others
    if not isinstance(blank, list) or not all(isinstance(node, str) for node in blank):
        return False
    return all(
        isinstance(line, dict)
        and all(isinstance(line.get(part, 0), str | None) for part in ("file", "sha256", "state"))
        for line in index["nodes"].values()
    )


def _complete(folder: Path) -> list[Path]:
    """Complete checkpoints, the newest first; one set aside comes after the one in its place."""
    try:
        matches = [(_NAME.fullmatch(path.name), path) for path in folder.iterdir()]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise RunFolderError(f"cannot read {folder}: {_reason(error)}") from error
    found = [(int(match[1]), match[2] is None, path) for match, path in matches if match]
    return [path for _, _, path in sorted(found, reverse=True)]


def _publish(draft: Path, target: Path) -> None:
    """Give a finished draft its name; at every moment one of old and new can be found."""
    aside = _with_suffix(target, _REPLACED)
    if target.exists():
        _delete(aside)
        os.replace(target, aside)
    os.replace(draft, target)
    sync_folder(target.parent)


def _tidy(target: Path, round: int, keep: int) -> None:
    """Delete what the checkpoint just written makes superfluous, and drafts left by a kill."""
    folder = target.parent
    complete = _complete(folder)
    aside = [path for path in complete if path.name.endswith(_REPLACED)]
    older = [path for path in complete if path not in aside and _round(path) < round]
    for path in [*aside, *older[keep - 1 :]]:
        _delete(path)
    for path in folder.glob(f"round-*{_PARTIAL}"):
        _delete(path)


def _delete(path: Path) -> None:
    """Delete a folder; half deleted it no longer bears the name of a complete checkpoint."""
    if not path.exists():
        return
    if not path.name.endswith(_PARTIAL):
        doomed = _with_suffix(path, _PARTIAL)
        _delete(doomed)
        os.replace(path, doomed)
        path = doomed
    shutil.rmtree(path)


def file_name(node: NodeId) -> str:
    """A file name for a node: percent-encoded, capitals too, so no two nodes share a file.

    A name too long for a file is replaced by its hash; the index has the node's name in any case.
    """
    raw = node.encode("utf-8", "surrogatepass")
    text = "".join(chr(byte) if byte in _SAFE else f"%{byte:02x}" for byte in raw)
    if len(text) > _LONGEST:
        text = f"%sha256-{hashlib.sha256(raw).hexdigest()}"
    return f"{text}.safetensors"


def _round(path: Path) -> int:
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else -1


def _with_suffix(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)


def _reason(error: OSError) -> str:
    return error.strerror or str(error)
