"""What a method's options mean: read from the comments beside its fields, or a common word's.

A field's meaning stands once, in the comment on its line or on the lines just above it; a subclass
that gives another default need not repeat it. Words that mean the same in every method stand in
`COMMON` and nowhere else; a comment beside such a field adds to it.
"""

from __future__ import annotations

import ast
import inspect
import io
import textwrap
import tokenize
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from functools import cache
from typing import Any

from fedstill.core.method import Method
from fedstill.core.ranges import hints, in_words

COMMON: Mapping[str, str] = {
    "lr": "learning rate of local training",
    "epochs": "local epochs per round",
    "batch_size": "batch size of local training",
    "momentum": "momentum of local training",
    "weight_decay": "weight decay of local training",
    "weighting": "weights of clients in the mean: by examples, or uniform",
    "augmentation": "augmentation of matched images; operations joined by _",
    "per_class": "synthetic images per class",
    "steps": "optimisation steps on the pixels of a synthetic set",
    "pixel_lr": "learning rate of the pixels",
    "pixel_momentum": "momentum of the pixels",
    "real_batch": "real examples per class in a step of matching",
    "start": "initialisation of synthetic images",
    "outputs": "which outputs of a network are matched",
    "client_weight": "weights of images in training: uniform, or by examples represented",
    "temperature": "temperature of the softmax",
    "generator": "the kind of untrained generator",
    "generator_width": "channels of the generator",
    "generator_steps": "steps of the generator in a turn",
    "generator_batch": "generated images in a step",
    "generator_lr": "learning rate of the generator",
    "noise_size": "dimension of the generator's noise",
    "latent": "dimension of the generator's noise",
    "distil_steps": "steps of distillation on the server in a turn",
    "distil_lr": "learning rate of distillation on the server",
    "distil_batch": "batch size of distillation on public images",
    "distil_momentum": "momentum of distillation on the server",
    "distil_decay": "weight decay of the student",
    "server_lr": "learning rate of the server",
    "server_momentum": "momentum of the server's training",
    "server_weight_decay": "weight decay of the server's training",
    "server_epochs": "epochs of the server over all synthetic images per round",
    "server_batch": "batch size of the server's training",
    "server_augmentation": "augmentation of the server's training images",
    "tune_epochs": "epochs of fine-tuning over all synthetic images per round",
    "tune_batch": "batch size of fine-tuning",
    "tune_lr": "learning rate of fine-tuning",
    "tune_momentum": "momentum of fine-tuning",
    "tune_weight_decay": "weight decay of fine-tuning",
    "tune_augmentation": "augmentation in fine-tuning",
    "merge": "how noise and label are combined for the generator",
    "diversity_weight": "weight of the diversity term",
    "transferability_weight": "weight of the disagreement between teachers and student",
    "selection": "which generated images count in the disagreement term",
}


@dataclass(frozen=True)
class Option:
    """A value of a method that a recipe may set."""

    name: str
    default: Any
    range: str
    meaning: str


def options_of(kind: type[Method]) -> list[Option]:
    """Every option of a method, in the order of its fields."""
    named = hints(kind)
    return [
        Option(
            field.name,
            None if field.default is MISSING else field.default,
            in_words(named[field.name]),
            meaning_of(kind, field.name),
        )
        for field in fields(kind)
    ]


def meaning_of(kind: type, name: str) -> str:
    """The common word's, and the comment beside a field, of the nearest class that has one."""
    comments = (_comments(ancestor).get(name, "") for ancestor in kind.__mro__)
    own = next((comment for comment in comments if comment), "")
    return "; ".join(part for part in (COMMON.get(name, ""), own) if part)


@cache
def _comments(kind: type) -> dict[str, str]:
    """The comments of a class's fields by name; none where its source is not at hand."""
    try:
        source = textwrap.dedent(inspect.getsource(kind))
    except (OSError, TypeError):
        return {}
    (body,) = ast.parse(source).body
    if not isinstance(body, ast.ClassDef):
        return {}
    remarks = {
        token.start[0]: (token.string.lstrip("# "), not token.line[: token.start[1]].strip())
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT and not token.string.startswith(("# type:", "# fmt:"))
    }  # by line: the text, and whether it has the line for itself
    found = {}
    for statement in body.body:
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
            continue
        lines: list[str] = []
        above = statement.lineno - 1
        while above in remarks and remarks[above][1]:
            lines.insert(0, remarks[above][0])
            above -= 1
        own = range(statement.lineno, (statement.end_lineno or statement.lineno) + 1)
        lines += [remarks[line][0] for line in own if line in remarks]
        if lines:
            found[statement.target.id] = " ".join(lines)
    return found
