"""fedstill beside other systems' own code: the same split, the same network, the same settings."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

import fedstill
from fedstill import Execution, Experiment, Population
from fedstill.core.method import Method
from fedstill.data import Collection, load
from fedstill.federation.run import Progress
from systems.htfllib import GENERATOR
from work import Rounds, Work, network

VERSIONS = ("torch", "numpy")


def everybody(work: Work) -> Collection:
    """The split: clients hold whole batches, since others leave a last incomplete one out."""
    split: dict[str, object] = {"kind": "iid", "clients": work.clients}
    if work.alpha:
        split |= {"kind": "dirichlet", "alpha": work.alpha}
    found = load(
        work.data_name, data_dir=work.data_dir, seed=0, size=work.size, partition=split
    )  # fmt: skip
    mixed = np.random.default_rng(0).permutation  # some of the others read in the order of the file
    sites = [
        replace(site, rows=mixed(site.rows)[: whole_batches(len(site.rows), work)])
        for site in found.sites
    ]
    return replace(found, sites=tuple(sites))


def whole_batches(examples: int, work: Work) -> int:
    """So many of a client's examples are used."""
    used = min(examples, work.most) if work.most else examples
    return max(1, used // work.batch) * work.batch


def method(work: Work) -> Method:
    """The method with the others' settings."""
    local = {"lr": work.lr, "batch_size": work.batch, "epochs": work.epochs}
    if work.method == "fedavg":
        return fedstill.FedAvg(**local)
    if work.method == "scaffold":
        return fedstill.Scaffold(**local)
    if work.method == "fedproto":
        return fedstill.FedProto(**local, momentum=0.0, pull=1.0)
    return fedstill.FedGen(
        **local, alpha=1.0, beta=0.0, decay=1.0, free_batch=work.batch, generator_steps=50,
        generator_batch=work.batch, generator_decay=0.0, diversity_weight=0.0,
        hidden=GENERATOR["hidden_dim"], noise_size=GENERATOR["noise_dim"],
        generator_lr=GENERATOR["generator_learning_rate"],
    )  # fmt: skip


def run(work: Work) -> dict[str, object]:
    population = Population(everybody(work), lambda: network(work).cpu())
    experiment = Experiment(
        method(work), population, rounds=work.rounds, seed=work.seed,
        sampling=fedstill.Sample(count=work.awake),
        evaluate_every=work.rounds,
    )  # fmt: skip
    rounds, reached = Rounds(work), [0.0]

    def watch(progress: Progress) -> None:
        if progress.round:
            rounds.end()
            reached[0] = progress.score or 0.0
        if progress.round < work.rounds:
            rounds.begin()

    execution = Execution(work.engine, work.device, work.precision)
    fedstill.run(experiment, execution=execution, watch=watch)
    return rounds.result(reached[0])
