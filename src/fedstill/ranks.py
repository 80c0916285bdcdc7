"""Several ranks, started by torchrun: rank 0 does what it is told, the others play for it."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fedstill.engines.talk import Line


@contextmanager
def joined() -> Iterator[Line | None]:
    """The line to the other ranks of this job, or None in a process that runs alone.

    Only rank 0 gets so far. Every other rank plays for it until the job ends, and exits. When
    rank 0 fails, the others notice that it is gone; so its message is out before they end.
    """
    if "RANK" not in os.environ or int(os.environ.get("WORLD_SIZE", "1")) < 2:
        yield None
        return
    from fedstill.engines.gloo import Gloo  # imports torch, so not before it is needed
    from fedstill.engines.talk import LEADER, Over, say_to_all

    line = Gloo(seat=int(os.environ.get("LOCAL_RANK", os.environ["RANK"])))
    if line.rank != LEADER:
        code = serve(line)
        line.close()
        raise SystemExit(code)
    try:
        yield line
    except SystemExit as end:
        if end.code:
            raise
        say_to_all(line, Over())
        line.close()
        raise
    say_to_all(line, Over())
    line.close()


def serve(line: Line) -> int:
    """Take part in run after run of rank 0's; the exit code."""
    from functools import partial

    from fedstill.build import Built
    from fedstill.config import checked
    from fedstill.engines import spread, talk
    from fedstill.federation.evaluate import scores

    try:
        while isinstance(request := talk.hear(line, talk.LEADER), talk.Begin):
            try:
                (recipe,) = checked(tomllib.loads(request.recipe))
                built = Built(recipe, line)
                question = partial(scores, built.experiment)
                worker = spread.Worker(built.own_engine, question, built.standing())
            except talk.Gone:
                raise
            except Exception as error:
                talk.excuse(line, error)
            else:
                spread.serve(worker, line)
    except talk.Gone:  # what rank 0 had to say, it has said
        return 2
    except KeyboardInterrupt:
        return 130
    return 0
