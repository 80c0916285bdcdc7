"""A method of any kind, small enough for the tiny world: work is cut by what fields are called."""

from __future__ import annotations

from dataclasses import fields

from fedstill.core.method import Method

# Names that several methods share for the same thing; a value is used where a field exists.
SMALL = {
    "lr": 0.1,
    "batch_size": 8,
    "per_class": 3,
    "steps": 5,
    "real_batch": 8,
    "server_lr": 0.1,
    "server_epochs": 10,
    "server_batch": 8,
    "warm_up_steps": 4,
    "local_steps": 3,
    "global_steps": 3,
    "global_per_class": 2,
    "refine_every": 2,
    "samplings": 2,
    "sampling_steps": 2,
    "tune_epochs": 8,
    "tune_batch": 8,
    "tune_lr": 0.02,
    "path_rounds": 2,
    "expert_steps": 1,
    "inner_steps": 2,
    "synthesis_steps": 3,
    "virtual_batch": 6,
    "generator_width": 4,
    "generator_steps": 5,
    "generator_batch": 8,
    "free_batch": 6,
    "hidden": 8,
    "synthesis_width": 4,
    "reg_weight": 0.1,  # a larger one blows rounding errors up within four rounds
    "distil_steps": 6,
    "distil_batch": 10,
    "distil_lr": 0.01,
    "pretrain_epochs": 5,
    "iterations": 2,
    "public_batch": 10,
    "rho": 2,  # budgets 1, 1/2, 1/4 for three clients
    "public_lr": 1e-4,  # more lets engines part: rounding errors move weights that do not matter
}


def small(kind: type[Method]) -> Method:
    """The method with little work to do."""
    known = {f.name: f.default for f in fields(kind)}
    chosen = {k: v for k, v in SMALL.items() if k in known}
    if "server_lr" in chosen and known["server_lr"] == 1.0:  # a factor, not a rate
        del chosen["server_lr"]
    if "tune_lr" in chosen and known["tune_lr"] < 1e-3:  # for a network that has learnt already
        del chosen["tune_lr"]
    if "lr" in chosen and known["lr"] <= 1e-3:  # Adam's
        chosen["lr"] = 0.01
    if "base" in known:
        chosen["base"] = small(type(known["base"]))
    return kind(**chosen)
