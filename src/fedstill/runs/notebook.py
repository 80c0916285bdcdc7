"""A progress bar where a run is watched in a notebook."""

from __future__ import annotations

import sys
from html import escape
from typing import Any

from fedstill.federation.run import Progress, Watch
from fedstill.report.amounts import human_bytes


def bar(title: str) -> Watch | None:
    """What draws a bar under a notebook's cell; None anywhere else.

    Nothing is imported for it: who is in a notebook has IPython already.
    """
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if shell is None or not hasattr(shell, "kernel"):
        return None
    display: Any = sys.modules["IPython.display"]
    shown: Any = None

    def watch(progress: Progress) -> None:
        nonlocal shown
        drawn = display.HTML(drawn_bar(title, progress))
        if shown is None:
            shown = display.display(drawn, display_id=True)
        else:
            shown.update(drawn)

    return watch


def drawn_bar(title: str, progress: Progress) -> str:
    """A bar as HTML: name, rounds, score and bytes so far."""
    told = [f"round {progress.round}/{progress.rounds}"]
    if progress.score is not None:
        percent = progress.metric == "accuracy"
        score = f"{100 * progress.score:.1f} %" if percent else f"{progress.score:.4f}"
        told.append(f"{progress.metric} {score}")
    told.append(f"{human_bytes(progress.bytes)} sent")
    return (
        f"<div><b>{escape(title)}</b> "
        f"<progress value='{progress.round}' max='{max(1, progress.rounds)}'></progress> "
        f"{escape(' · '.join(told))}</div>"
    )
