"""Several ranks, started by torchrun: rank 0 does what it is told, the others play for it."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fedstill.engines.ranks.protocol import Transport


@contextmanager
def joined() -> Iterator[Transport | None]:
    """The line to the other ranks of this job, or None in a process that runs alone.

    Only rank 0 gets so far. Every other rank plays for it until the job ends, and exits. When
    rank 0 fails, the others notice that it is gone; so its message is out before they end.
    """
    if "RANK" not in os.environ or int(os.environ.get("WORLD_SIZE", "1")) < 2:
        yield None
        return
    from fedstill.engines.ranks.gloo import Gloo  # imports torch, so not before it is needed
    from fedstill.engines.ranks.protocol import LEADER, Over, say_to_all

    transport = Gloo(local_rank=int(os.environ.get("LOCAL_RANK", os.environ["RANK"])))
    if transport.rank != LEADER:
        code = serve(transport)
        transport.close()
        raise SystemExit(code)
    try:
        yield transport
    except SystemExit as end:
        if end.code:
            raise
        say_to_all(transport, Over())
        transport.close()
        raise
    say_to_all(transport, Over())
    transport.close()


def serve(transport: Transport) -> int:
    """Take part in run after run of rank 0's; the exit code."""
    from contextlib import ExitStack, suppress

    from fedstill.engines.ranks import follower
    from fedstill.engines.ranks import protocol as talk
    from fedstill.recipe.check import checked
    from fedstill.runs.recipes import worker

    try:
        while isinstance(request := talk.hear(transport, talk.LEADER), talk.Begin):
            with suppress(talk.Abandoned), ExitStack() as run:
                try:
                    (recipe,) = checked(tomllib.loads(request.recipe))
                    made = run.enter_context(worker(recipe, transport))
                except (talk.Disconnected, talk.Abandoned):
                    raise
                except Exception as error:
                    talk.excuse(transport, error)
                else:
                    follower.serve(made, transport)
    except talk.Disconnected:  # what rank 0 had to say, it has said
        return 2
    except KeyboardInterrupt:
        return 130
    return 0
