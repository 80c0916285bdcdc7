"""Run folders written by hand, quickly: all that a report can show, with numbers one can redo."""

from __future__ import annotations

import json
from itertools import cycle
from pathlib import Path

import numpy as np

from fedstill.logbook import FolderLog, Note, Number, Traffic, read_rows, summarise, write_summary
from fedstill.report import image_sets

CLIENTS = ("north", "south", "<b>east</b>")
NASTY = "<img src=x onerror=\"document.title='broken'\"></script><script>alert(1)</script>"


def accuracy(method: int, seed: int, round: int, client: int) -> float:
    """Grows by 0.02 a round; methods, seeds and clients lie 0.1, 0.01 and 0.05 apart."""
    return 0.3 + 0.02 * round + 0.1 * method + 0.01 * seed - 0.05 * client


def run_folder(
    folder: Path,
    *,
    method: str = "fedavg",
    number: int = 0,
    seed: int = 0,
    rounds: int = 4,
    done: int | None = None,
    own: bool = False,
    home: bool = False,
    nasty: bool = False,
) -> Path:
    """A run; its clients' own models are scored crosswise with `own`, else the server's.

    With `home` each client's own model is scored on its own test set alone.
    """
    done = rounds if done is None else done
    with FolderLog(folder) as log:
        log.write(Note(0, "engine", "", "in_process, chosen by hand"))
        if nasty:
            log.write(Note(1, "warning", CLIENTS[2], NASTY))
        for round in range(1, done + 1):
            for client in CLIENTS:
                log.write(Number(round, "update", client, "loss", "", 2.0 / round + 0.1 * number))
                log.write(Traffic(round, "update", client, "up", "weights", 1000, 4000, 1))
            log.write(Traffic(round, "broadcast", "server", "down", "weights", 1000, 4000, 3))
            for place, target in enumerate(CLIENTS):
                value = accuracy(number, seed, round, place)
                for node in (target,) if home else CLIENTS if own else ("server",):
                    other = 0.1 if own and node != target else 0.0
                    log.write(Number(round, "evaluate", node, "accuracy", target, value - other))
                    log.write(Number(round, "evaluate", node, "loss", target, 1 - value + other))
                    if round == done:
                        _confusions(log, round, node, target)
            log.write(Number(round, "round", "", "seconds", "", 2.0))
    name = "nasty" if nasty else "handmade"
    (folder / "recipe.toml").write_text(
        f'[about]\nsource = "written by hand"\nnote = {json.dumps(NASTY)}\n'
        f'[run]\nname = "{name}"\nseed = {seed}\nrounds = {rounds}\n[method]\nname = "{method}"\n'
        '[data]\nname = "digits"\n[models]\nname = "convnet"\n'
        '[reported]\naverage = 40.0\nsource = "Somebody 2020"\n',
        encoding="utf-8",
    )
    (folder / "partition.csv").write_text(
        "client,cat,<i>dog</i>,total\nnorth,10,0,10\nsouth,3,7,10\n<b>east</b>,5,5,10\n"
    )
    (folder / "environment.json").write_text(json.dumps({"fedstill": "0.1.0", "torch": "2.9"}))
    if done == rounds:
        networks = dict(zip(CLIENTS, cycle(("convnet", "alexnet", "mlp")), strict=False))
        facts = {"data_digest": "d1", "method": method, "networks": networks, "seed": seed}
        write_summary(folder, summarise(read_rows(folder), rounds=rounds, **facts))
    return folder


def _confusions(log: FolderLog, round: int, node: str, target: str) -> None:
    """Of four examples of class 0 three are right, of two of class 1 one."""
    for pair, count in {"0.0": 3, "0.1": 1, "1.1": 1, "1.0": 1}.items():
        log.write(Number(round, "evaluate", node, f"confusion.{pair}", target, count))


def images(folder: Path, rounds: tuple[int, ...] = (2, 4)) -> None:
    """Two images of each of two classes by client, brighter in later rounds; one is missing."""
    for round in rounds:
        stack = np.full((2, 2, 8, 8, 1), round / 10)
        stack[1, 1] = np.nan
        kept = image_sets.kept(dict.fromkeys(CLIENTS, stack))
        image_sets.write(folder / "pictures" / "synthetic", round, kept)


def everything(place: Path) -> Path:
    """Three methods, two seeds each, one run unfinished, with all that may lie beside them."""
    for seed in (0, 1):
        run_folder(place / "fedavg" / f"seed-{seed}", seed=seed, nasty=True)
        feddm = run_folder(place / "feddm" / f"seed-{seed}", method="feddm", number=2, seed=seed)
        images(feddm)
    run_folder(place / "desa" / "seed-0", method="desa", number=1, own=True)
    run_folder(place / "desa" / "seed-1", method="desa", number=1, seed=1, own=True, done=2)
    ledger = (
        "round,step,node,mechanism,sigma,rate,releases\n"
        "1,synthesize,north,gaussian,2.5,0.1,20\n2,synthesize,north,gaussian,2.5,0.1,20\n"
    )
    private = place / "feddm" / "seed-0"
    (private / "privacy.csv").write_text(ledger)
    summary = json.loads((private / "summary.json").read_text())
    limits = ["of this run: others, with other seeds, add up", "noise is simulated"]
    (private / "summary.json").write_text(json.dumps({**summary, "privacy": {"limits": limits}}))
    (place / "audit.json").write_text(json.dumps({"canaries": {"found": 3, "of": 10}}))
    points = [[0.0, 0.0, "north", 0], [1.0, 2.0, "south", 1], [2.0, 1.0, CLIENTS[2], 1]]
    pairs = {"north - south": 0.25, "north - east": 0.2}
    shift = {"pairs": [{"clients": who, "mmd real": value} for who, value in pairs.items()],
             "maps": [{"title": "Clients' examples", "points": points}]}  # fmt: skip
    (place / "shift.json").write_text(json.dumps(shift))
    return place
