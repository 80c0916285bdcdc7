"""The few exceptions; each message names the thing, what was expected, what came, what to do."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import FrozenInstanceError
from difflib import get_close_matches

LONGEST = 300  # characters of what another party says in words


class FedstillError(Exception):
    """Anything fedstill refuses, with a message meant for a person."""


class ProtocolError(FedstillError):
    """A method's steps do not fit together."""


class BadValue(FedstillError, ValueError):
    """One or more values are out of range; `faults` holds a line for each."""

    def __init__(self, faults: str | Iterable[str]):
        self.faults = [faults] if isinstance(faults, str) else list(faults)
        super().__init__("\n".join(self.faults))


class DataError(FedstillError, ValueError):
    """A data set is missing, broken or cannot be split as asked."""


class RecipeError(BadValue):
    """A recipe has faults; all of them are listed."""


class WireError(FedstillError, ValueError):
    """Bytes that arrived are not the record that was expected."""


class BadMessage(FedstillError):
    """A message that must not be delivered: not finite, or of another shape than announced."""


class RunFolderError(FedstillError):
    """A run folder cannot be written, read or resumed."""


class SealedData(FedstillError):
    """Records were read that privacy keeps closed."""


class RankError(FedstillError):
    """Another rank of a job failed, or cannot be reached."""


class SiteError(FedstillError):
    """A site refuses, has failed, or cannot be reached."""


class StepError(FedstillError):
    """A step failed on a node; says which method, step, node and round."""

    def __init__(self, method: str, step: str, node: str, round: int, cause: BaseException):
        self.method, self.step, self.node, self.round = method, step, node, round
        super().__init__(
            f"{method}.{step} failed on {node} in round {round}: {type(cause).__name__}: {cause}"
            f"{_advice(cause)}"
        )


_ADVICE = {  # by how Python's words begin
    "'Data' object ": 'examples come in batches: data.batches(size, node.rng("order")), '
    "data.chunks(size) or data.all()",
    "'Node' object has no attribute": "clients' names are in node.models, what a party remembers "
    "is in node.state",
    "Model.__call__() missing": "a network holds no weights; write model(weights, x)",
}


def _advice(cause: BaseException) -> str:
    """What to do about mistakes that Python tells in its own words."""
    if isinstance(cause, FrozenInstanceError):
        return (
            "; records and methods are not written into; what a party remembers is replaced: "
            "node.state = node.state.replace(…)"
        )
    if isinstance(cause, AttributeError) and cause.obj is None:
        return (
            "; if it is a memory that is missing: what a party remembers before its first step, "
            "client_state or server_state returns"
        )
    if isinstance(cause, AttributeError) and hasattr(type(cause.obj), "evaluating"):
        return (
            "; a network holds neither weights nor a mode: model(weights, x) is as in training, "
            "model.evaluating(weights, x) as in evaluation"
        )
    said = str(cause)
    return next((f"; {what}" for words, what in _ADVICE.items() if said.startswith(words)), "")


def told(text: str, longest: int = LONGEST) -> str:
    """What another party says in words, as it may stand in a log: one short line."""
    line = "".join(c if c.isprintable() else " " for c in text)
    return line if len(line) <= longest else f"{line[:longest]}…"


def unknown(kind: str, name: str, known: Iterable[str]) -> str:
    """A line for a name that is not in a table, with the nearest one that is."""
    names = sorted(known)
    ours = name.replace("learning_rate", "lr")  # as most others write it
    near = [ours] if ours in names else get_close_matches(name, names, n=1, cutoff=0.5)
    if not near:  # SCAFFOLD for scaffold
        spelled = {other.casefold(): other for other in reversed(names)}
        near = [spelled[key] for key in get_close_matches(name.casefold(), spelled, 1, 0.5)]
    hint = f" did you mean {near[0]!r}?" if near else ""
    return f"unknown {kind} {name!r};{hint} known: {', '.join(names) or 'none'}"
