"""What a server teaches its model by is recorded once, for all turns of all rounds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fedstill.core import trees
from fedstill.core.loop import Descent
from fedstill.core.node import SERVER
from fedstill.engines.loops.graphs import CudaGraphs, Replay
from fedstill.engines.loops.recorded import Recorder
from fedstill.engines.play.in_process import InProcess
from fedstill.methods.dense import Dense
from fedstill.methods.dfrd import DFRD
from fedstill.methods.fedftg import FedFTG
from fedstill.parts.image_search import Search
from worlds import pictures, played

DEVICES = [
    "cpu",
    pytest.param(
        "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
    ),
]
METHODS: dict[str, tuple[Any, dict[str, Any]]] = {
    "dfrd": (DFRD, {}),
    "fedftg": (FedFTG, {}),
    "dense": (Dense, {}),
    "dense-stream": (Dense, {"synthesis": "stream"}),
}


class Replayed(InProcess):
    """Replays what it can; on a CPU by a stand-in for graphs, the step itself."""

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self.captured = 0
        graphs = tried_once if self.device.type == "cpu" else CudaGraphs(self.device)

        def record(step: Callable[[], None]) -> Replay:
            self.captured += 1
            return graphs(step)

        self.recorder = Recorder(record, notes=self.notes)


def tried_once(step: Callable[[], None]) -> Replay:
    step()
    return step


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", METHODS)
def test_lessons_are_recorded_once_and_give_the_very_same(name: str, device: str) -> None:
    kind, changes = METHODS[name]
    steps = {"generator_steps": 5, "distil_steps": 2}
    method = kind(**{**kind.presets["small"], **steps, **changes})
    plain, _ = played(method, pictures(), 2, InProcess, device=device)
    replayed, _ = played(method, pictures(), 2, Replayed, device=device)
    later, _ = played(method, pictures(), 4, Replayed, device=device)
    assert replayed.notes == []  # everything could be recorded
    assert later.captured == replayed.captured  # and nothing again in later rounds
    bodies = [body for body, *_ in replayed.recorder.known]
    told = [body.objective.__name__ for body in bodies if isinstance(body, Descent)]
    if name == "dense":
        assert len([body for body in bodies if isinstance(body, Search)]) == 1
    else:  # two steps a turn are few, but there are two turns; DFRD's average teaches besides
        assert told.count("invention") == 1
        assert told.count("distillation") == (2 if name == "dfrd" else 1)
    expected, found = (trees.tensors(engine.states[SERVER]) for engine in (plain, replayed))
    for one, other in zip(expected, found, strict=True):
        assert torch.equal(one, other) if device == "cpu" else torch.allclose(one, other, atol=1e-3)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("norm", ["static", "batch"])
def test_teachers_on_a_gpu_say_what_they_say_stacked(norm: Any) -> None:
    from fedstill.models import Conv4
    from fedstill.parts.teachers import Ensemble

    model = Conv4((3, 16, 16), 4, widths=(8, 8, 16, 16), norm=norm)
    weights = [model.init(seed) for seed in range(3)]
    ensemble = Ensemble.of([model] * 3)
    stacks = ensemble.stacked(weights)
    x = torch.randn(6, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    here = ensemble.logits(stacks, x)
    there = ensemble.logits([trees.to(stack, "cuda") for stack in stacks], x.cuda())
    assert torch.allclose(here, there.cpu(), atol=2e-2)
