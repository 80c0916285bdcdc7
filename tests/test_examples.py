"""The examples run as a reader would run them."""

from __future__ import annotations

import math
import os
import runpy
import sys
from collections.abc import Callable
from copy import deepcopy
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import fedstill
from fedstill.core.seeds import generator
from fedstill.testing import CHECKS

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture
def printed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., str]:
    """What an example prints, run as a program."""

    def run(name: str, *arguments: object) -> str:
        path = str(EXAMPLES / name)
        monkeypatch.setattr(sys, "argv", [path, *map(str, arguments)])
        runpy.run_path(path, run_name="__main__")
        return capsys.readouterr().out

    return run


def rows(text: str) -> dict[str, list[str]]:
    """The lines of a Markdown table by their first cell."""
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return {first: cells for first, *cells in lines}


def test_the_first_run_prints_a_row_for_each_method_and_leaves_their_folders(
    tmp_path: Path, printed: Callable[..., str]
) -> None:
    table = rows(printed("first_run.py", tmp_path))
    assert {"local", "fedavg"} <= set(table)
    assert len(table["method"]) == len(table["fedavg"])
    for name in ("local", "fedavg"):
        assert (tmp_path / name / "summary.json").exists()


def test_the_new_method_without_momentum_is_fedavg_and_with_it_is_not_and_keeps_the_contract(
    printed: Callable[..., str],
) -> None:
    text = printed("new_method.py")
    assert f"FedAvgM: 0 of {len(CHECKS)} broken" in text
    table = rows(text)
    accuracies = table["method"].index("bytes up")
    plain, without, with_it = (
        [float(cell) for cell in table[name][:accuracies]]
        for name in ("fedavg", "fedavgm-0", "fedavgm")
    )
    assert without == pytest.approx(plain, abs=0.7)  # rounding may turn one example of 150
    assert with_it != pytest.approx(plain, abs=0.7)


def test_old_weights_cost_accuracy_where_clients_miss_rounds_and_are_fedavgs_where_none_does(
    printed: Callable[..., str],
) -> None:
    text = printed("stale_weights.py")
    assert f"StaleFedAvg: 0 of {len(CHECKS)} broken" in text
    assert f"StaleFedLGD: 0 of {len(CHECKS)} broken" in text
    table = rows(text)
    average = table["method"].index("average")
    everybody, some = (
        [
            table[f"{name.lower()} {name}, {part} of the clients"]
            for name in ("FedAvg", "StaleFedAvg")
        ]
        for part in ("100%", "40%")
    )
    assert everybody[0][: average + 1] == everybody[1][: average + 1]
    assert float(some[1][average]) < float(some[0][average])


def test_without_personal_layers_clients_are_fedavgs_and_with_them_less_travels(
    printed: Callable[..., str],
) -> None:
    text = printed("personal_layers.py")
    assert f"Personal: 0 of {len(CHECKS)} broken" in text
    table = rows(text)
    local, up = (table["method"].index(name) for name in ("local", "bytes up"))
    assert table["personal none"][local] == table["fedavg"][local]
    assert table["personal none"][up] == table["fedavg"][up]
    whole, head, norms = (
        float(table[f"personal {name}"][up].split()[0]) for name in ("none", "head", "norms")
    )
    assert head < norms < whole


def test_a_student_that_nobody_teaches_is_fedavgs_beside_mentors_of_any_network(
    printed: Callable[..., str],
) -> None:
    text = printed("small_student.py")
    assert f"FedKD: 0 of {len(CHECKS)} broken" in text
    table = rows(text)
    average, up = (table["method"].index(name) for name in ("average", "bytes up"))
    plain, untaught, taught = (float(table[n][average]) for n in ("fedavg", "fedkd-0", "fedkd"))
    assert untaught == pytest.approx(plain, abs=0.7)  # rounding may turn one example of 150
    assert taught != pytest.approx(plain, abs=0.05)
    assert table["fedkd"][up] == table["fedavg"][up]


class Net(nn.Module):
    """A layer of each."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(6, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.first(x)))  # type: ignore[no-any-return]


def test_gossip_in_a_ring_is_what_a_few_lines_of_torch_make_and_keeps_the_contract(
    printed: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = printed("gossip_ring.py")
    assert f"GossipSGD: 0 of {len(CHECKS)} broken" in text
    monkeypatch.syspath_prepend(str(EXAMPLES))
    method = import_module("gossip_ring").GossipSGD
    rng = generator(0, "gossip")
    sets = {f"c{i}": (torch.randn(20, 6, generator=rng), torch.arange(20) % 3) for i in range(5)}
    data = fedstill.clients(sets, test=sets["c0"], normalise=None)
    network = fedstill.Module(data.shape, data.classes, net := Net(), start="given")
    nets = [deepcopy(net) for _ in sets]
    population = fedstill.Population(data, network)
    values = {"lr": 0.1, "momentum": 0.9, "batch_size": 20}
    run = fedstill.run(
        fedstill.Experiment(method(**values), population, rounds=6, topology=fedstill.Ring())
    )
    # W = I - L / its largest eigenvalue; that of a circle of five is 2 + 2 cos 36°.
    edge = 1 / (2 + 2 * math.cos(math.pi / 5))
    optimisers = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in nets]
    for _ in range(6):
        said = [parameters_to_vector(each.parameters()).detach() for each in nets]
        for i, ((x, y), each, optimiser) in enumerate(
            zip(sets.values(), nets, optimisers, strict=True)
        ):
            mixed = said[i] + edge * (said[i - 1] + said[(i + 1) % 5] - 2 * said[i])
            vector_to_parameters(mixed, each.parameters())
            optimiser.zero_grad()
            cross_entropy(each(x), y).backward()
            optimiser.step()
    for client, each in zip(sets, nets, strict=True):
        weights = run.model(client).weights
        for name, tensor in each.state_dict().items():
            assert torch.allclose(weights[name], tensor, atol=1e-6)
            assert not torch.allclose(tensor, net.state_dict()[name], atol=1e-3)


def test_in_one_dimension_feddm_comes_lower_than_fedavg_and_both_are_drawn(
    tmp_path: Path, printed: Callable[..., str]
) -> None:
    text = printed("one_dimension.py", tmp_path / "one.png")
    loss = {name: float(cells[1]) for name, cells in rows(text).items() if name[0] not in "-w|"}
    assert loss["lowest"] <= loss["FedDM"] < min(loss["FedAvg"], loss["start"])
    gap = float(text.split("losses by ")[1].split()[0])
    assert gap < 0.1 * loss["lowest"]  # what is sent imitates the clients' losses in the ball
    assert (tmp_path / "one.png").stat().st_size > 10_000


NOTEBOOKS = ("my_arrays", "compare_and_publish", "write_a_method")


@pytest.fixture(scope="module")
def notebooks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[Any]]]:
    """A folder, and the cells of all notebooks after they were run there from top to bottom.

    One kernel runs them, as it takes seconds to start; what one defined is gone for the next.
    """
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    folder, cells = tmp_path_factory.mktemp("notebooks"), {}
    for name in NOTEBOOKS:
        cells[name] = nbformat.read(EXAMPLES / f"{name}.ipynb", as_version=4).cells
    one = nbformat.v4.new_notebook()
    for each in cells.values():
        one.cells += [*each, nbformat.v4.new_code_cell("%reset -f")]
    with pytest.MonkeyPatch.context() as patch:  # cells call the command `fedstill`
        patch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
        resources = {"metadata": {"path": str(folder)}}
        nbclient.NotebookClient(one, timeout=600, resources=resources).execute()
    return folder, cells


def shown(cell: Any, kind: str) -> str:
    """All that a cell displays in one form."""
    return "".join(str(each.get("data", {}).get(kind, "")) for each in cell.outputs)


def test_the_first_notebook_shows_progress_a_table_and_a_curve(notebooks: Any) -> None:
    *_, played, compared, plotted = notebooks[1]["my_arrays"]
    assert "<progress value='3' max='3'>" in shown(played, "text/html")
    assert "<table" in shown(compared, "text/html")
    assert shown(plotted, "image/png")


def test_the_notebook_that_compares_shows_data_means_and_writes_a_report(
    notebooks: Any,
) -> None:
    folder, run = notebooks
    cells = [cell for cell in run["compare_and_publish"] if "outputs" in cell]
    loaded, _, compared, _, plotted, _ = cells
    assert "<th>plain</th>" in shown(loaded, "text/html")
    assert "±" in shown(compared, "text/html")
    assert shown(plotted, "image/png")
    assert (folder / "runs" / "report.html").exists()


def test_the_notebook_that_writes_a_method_finds_fedavg_in_it(notebooks: Any) -> None:
    cells = notebooks[1]["write_a_method"]
    assert "bytes sent" in shown(cells[-2], "text/html")  # its assertion held, the run is shown


def test_embeddings_of_a_frozen_backbone_train_a_head_by_averaging_and_by_distillation(
    printed: Callable[..., str],
) -> None:
    text = printed("embeddings.py", 1)
    assert "5 clients, 64 features, 10 classes" in text
    table = rows(text)
    column = table["method"].index("average") if "average" in table["method"] else 0
    for name in ("fedavg", "feddm"):
        assert float(table[name][column]) > 20  # percent; a tenth is chance
