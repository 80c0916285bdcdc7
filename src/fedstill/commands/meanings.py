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
    "epochs": "passes over its own examples that a client makes in a round",
    "batch_size": "examples in a step of local training",
    "momentum": "momentum of local training",
    "weight_decay": "weight decay of local training",
    "weighting": "how clients count in a mean: by their examples, or all alike",
    "augmentation": "how images are changed before they are matched; operations joined by _",
    "per_class": "synthetic images of each class",
    "steps": "steps in which the pixels of a synthetic set are fitted",
    "pixel_lr": "learning rate of the pixels",
    "pixel_momentum": "momentum of the pixels",
    "real_batch": "real examples of a class that a step of matching sees",
    "start": "what synthetic images are before the first step",
    "outputs": "which outputs of a network are matched",
    "client_weight": "how images count in training: all alike, or by the examples they stand for",
    "temperature": "by which logits or similarities are divided before the softmax",
    "generator": "the kind of untrained generator",
    "generator_width": "channels of the generator",
    "generator_steps": "steps of the generator in a turn",
    "generator_batch": "images that the generator makes in a step",
    "generator_lr": "learning rate of the generator",
    "noise_size": "numbers of noise that the generator starts from",
    "latent": "numbers of noise that the generator starts from",
    "distil_steps": "steps of distillation on the server in a turn",
    "distil_lr": "learning rate of distillation on the server",
    "distil_batch": "public images in a step of distillation",
    "distil_momentum": "momentum of distillation on the server",
    "distil_decay": "weight decay of the student",
    "server_lr": "learning rate of the server",
    "server_momentum": "momentum of the server's training",
    "server_weight_decay": "weight decay of the server's training",
    "server_epochs": "passes that the server makes over all synthetic images in a round",
    "server_batch": "images in a step of the server",
    "server_augmentation": "how the server changes images before it trains on them",
    "tune_epochs": "passes of fine-tuning over all synthetic images in a round",
    "tune_batch": "images in a step of fine-tuning",
    "tune_lr": "learning rate of fine-tuning",
    "tune_momentum": "momentum of fine-tuning",
    "tune_weight_decay": "weight decay of fine-tuning",
    "tune_augmentation": "how images are changed before fine-tuning sees them",
    "merge": "how noise and label enter the generator together",
    "diversity_weight": "weight of the term that keeps what is generated apart",
    "transferability_weight": "weight of the term that asks for images on which teachers and "
    "student disagree",
    "selection": "which generated images count in the term of disagreement",
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
