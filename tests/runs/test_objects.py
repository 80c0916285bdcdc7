"""Runs of objects: in memory, in a folder, gone on with, compared and drawn."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedstill
from fedstill import MLP, Execution, Experiment, FedAvg, Local, Population
from fedstill.core import Inbox, Model, Node, NodeId, Scored, at_clients
from fedstill.core.errors import BadValue, RunFolderError
from fedstill.federation.experiment import SUCH
from fedstill.methods.fedavg import Down, Up
from small_recipes import contents, last_weights, metrics, write_recipe
from small_recipes import fedstill as command

HERE = Execution(device="cpu")


def arrays(seed: int = 0, count: int = 90) -> tuple[Any, Any]:
    """Points around three centres."""
    rng = np.random.default_rng(seed)
    y = np.arange(count) % 3
    return (3 * np.eye(3)[y] + rng.normal(size=(count, 3))).astype(np.float32), y


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.layers(x)
        return made


def population(seed: int = 0) -> Population:
    data = fedstill.split(*arrays(), partition=fedstill.Dirichlet(3, 1.0), seed=seed)
    return Population(data, Net)


def experiment(method: Any = None, rounds: int = 3, **options: Any) -> Experiment:
    method = method or FedAvg(lr=0.1, batch_size=8)
    return Experiment(method, population(), rounds=rounds, **options)


def values(run: Any) -> list[Any]:
    return [row for row in run.metrics if row.name != "seconds"]


def test_a_score_that_a_summary_does_not_have_is_told_which_it_has(tmp_path: Path) -> None:
    fedstill.run(experiment(Local(), 1), execution=HERE, folder=tmp_path / "run", pictures=False)
    here = fedstill.run(experiment(FedAvg(), 1), execution=HERE)
    with pytest.raises(KeyError, match=r"no 'average_accuracy' .* it has .*averaged_local_acc"):
        fedstill.read(tmp_path / "run").summary["average_accuracy"]
    with pytest.raises(KeyError, match=r"no 'averaged_local_accuracy' .* has average_accuracy, "):
        here.summary["averaged_local_accuracy"]
    with pytest.raises(KeyError, match=r"no 'bytes'; it has status, rounds, .*traffic"):
        here.summary["bytes"]
    assert here.summary.get("bytes") is None
    assert "bytes" not in here.summary


def test_a_run_is_the_same_inside_a_programs_autocast() -> None:
    """What a program has around its call does not change what comes of a seed."""
    plain = fedstill.run(experiment(rounds=1), execution=HERE)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = fedstill.run(experiment(rounds=1), execution=HERE)
        assert torch.is_autocast_enabled("cpu")
    assert values(inside) == values(plain)


def test_defaults_of_torch_that_nothing_here_computes_with_are_refused() -> None:
    ready = experiment(rounds=1)
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        with pytest.raises(
            BadValue, match=r"float64.*call torch.set_default_dtype\(torch.float32\)"
        ):
            population()
        with pytest.raises(BadValue, match=r"default type is torch.float64"):
            fedstill.run(ready, execution=HERE)
    finally:
        torch.set_default_dtype(before)
    with torch.device("meta"), pytest.raises(BadValue, match=r"default device is meta.*Execution"):
        population()


def test_a_run_inside_inference_mode_is_refused_and_a_model_answers_there() -> None:
    ready = experiment(rounds=1)
    with torch.inference_mode():
        with pytest.raises(BadValue, match=r"call run outside torch\.inference_mode\(\)"):
            fedstill.run(ready, execution=HERE)
        with pytest.raises(BadValue, match=r"inside which torch keeps no gradients"):
            population()
    with torch.no_grad():
        made = fedstill.run(ready, execution=HERE)
    assert values(made) == values(fedstill.run(ready, execution=HERE))
    x = torch.as_tensor(arrays()[0][:2], dtype=torch.float32)
    with torch.inference_mode():
        assert torch.isfinite(made.model()(x)).all()


def test_public_data_that_clients_cannot_take_are_refused_before_a_run() -> None:
    x, _ = arrays()
    data = population().data
    with pytest.raises(BadValue, match=r"what fedstill.unlabelled\(x\) gives, not a ndarray"):
        Population(data, Net, public=x)  # type: ignore[arg-type]
    with pytest.raises(BadValue, match="inputs are of 2, but those of the clients are of 3"):
        Population(data, Net, public=fedstill.unlabelled(x[:, :2]))
    Population(data, Net, public=fedstill.unlabelled(x))


def test_a_model_says_what_it_takes_and_where_its_run_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    x, _ = arrays(count=3)
    made = fedstill.run(experiment(rounds=1), execution=HERE, folder="mine", pictures=False)
    with pytest.raises(BadValue, match=r"inputs must be \[example, 3\], but are \[3\]; for one ex"):
        made.model()(x[0])
    with pytest.raises(BadValue, match=r"inputs must be \[example, 3\], but are \[3, 2\]$"):
        made.model()(x[:, :2])
    with pytest.raises(KeyError, match=r"unknown party 'client-9'; .* known: client-00"):
        population().party("client-9")
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    with pytest.raises(RunFolderError, match=r"there is no run folder mine, seen from .*other"):
        made.model()


def test_what_is_given_in_the_wrong_form_is_told_what_to_write() -> None:
    made = fedstill.run(experiment(rounds=1), execution=HERE)
    with pytest.raises(RunFolderError, match="unknown party '0'; known: client-00"):
        made.model(0)  # type: ignore[arg-type]
    with pytest.raises(BadValue, match=r"as a list: fedstill.compare\(\[first, second\]\)"):
        fedstill.compare(made, made)  # type: ignore[arg-type]
    with pytest.raises(BadValue, match=r"as a list: fedstill.plot\(\[first, second\], path\)"):
        fedstill.plot(made, made)  # type: ignore[arg-type]
    with pytest.raises(fedstill.FedstillError, match=r"not the class Iid; write Iid\(…\)"):
        fedstill.split(*arrays(), partition=fedstill.Iid)  # type: ignore[arg-type]
    with pytest.raises(BadValue, match=r"must be Sequence, such as \[EightBit\(\)\]"):
        experiment(channels=fedstill.EightBit())
    with pytest.raises(BadValue, match="watch = True: must be a function of a Progress"):
        fedstill.run(experiment(), watch=True)  # type: ignore[arg-type]
    with pytest.raises(BadValue, match="'mps': use auto, cpu, cuda"):
        Execution(device="mps")


def test_a_run_in_memory_can_be_asked_for_everything() -> None:
    seen: list[int] = []
    run = fedstill.run(experiment(), execution=HERE, watch=lambda p: seen.append(p.round))
    assert seen == [0, 1, 2, 3] and run.folder is None
    curve = run.accuracy_by_round()
    assert list(curve) == [1, 2, 3] and run.summary["average_accuracy"] == curve[3] > 1 / 3
    assert run.summary["method"] == "fedavg" and run.summary["data"] == "arrays"
    assert (
        sum(row.bytes for row in run.traffic if row.direction == "up")
        == (run.summary["traffic"]["up"]["said"]["bytes"])
    )
    assert run.notes[0].kind == "engine"
    html = run._repr_html_()
    assert "in memory" in html and f"{100 * curve[3]:.2f} %" in html


@pytest.mark.parametrize("name", ["", "ward\na", "ward\ra", "ward\x1fchannels", "ward\udc80"])
def test_a_name_that_no_table_can_hold_is_refused_before_anything_is_played(name: str) -> None:
    x, y = arrays()
    people = Population(fedstill.clients({name: (x, y), "other": (x, y)}), Net)
    with pytest.raises(BadValue) as refused:
        Experiment(FedAvg(), people)
    assert str(refused.value).startswith(f"clients: the name {name!r} ")


def test_long_names_and_names_of_any_script_are_found_again_after_a_stop(tmp_path: Path) -> None:
    x, y = arrays()
    names = ["ü" * 300, "日本/..", 'a,"b"', " "]
    people = Population(fedstill.clients(dict.fromkeys(names, (x, y))), Net)
    method = Local(lr=0.1, batch_size=8)
    whole = fedstill.run(Experiment(method, people, rounds=2), execution=HERE)
    place: dict[str, Any] = {"execution": HERE, "folder": tmp_path / "run", "pictures": False}
    fedstill.run(Experiment(method, people, rounds=1), **place)
    gone_on = fedstill.run(Experiment(method, people, rounds=2), **place, resume=True)
    assert values(gone_on) == values(whole)
    assert {row.node for row in values(gone_on)} >= set(names)


OWN_METHOD = '''
"""Own: what a user wrote."""

from fedstill import FedAvg


class Own(FedAvg):
    """As it was."""
'''


def test_a_run_that_goes_on_with_changed_code_of_a_method_says_so(tmp_path: Path) -> None:
    file, out = tmp_path / "own.py", tmp_path / "run"
    file.write_text(OWN_METHOD)
    method = {"name": f"{file}:Own", "lr": 0.1}
    recipe = write_recipe(tmp_path, method=method, run={"rounds": 1})
    assert command("run", recipe, "--out", out).code == 0
    for rounds, changed in ((2, False), (3, True), (4, False)):
        if changed:
            file.write_text(OWN_METHOD.replace("As it was", "As it is now"))
        assert command("resume", out, f"run.rounds={rounds}").code == 0
        warnings = [note for note in fedstill.read(out).notes if note.kind == "warning"]
        said = [note.text for note in warnings if note.round == rounds - 1]
        assert len(said) == changed
        assert all("code of" in text and "has changed since round 2" in text for text in said)


class First:
    """The first so many clients, by a class that is no dataclass."""

    def __init__(self, count: int):
        self.count, self._asked = count, 0

    def awake(self, round: int, members: Any, seed: int) -> list[str]:
        self._asked += 1
        return sorted(members)[: self.count]


@pytest.mark.parametrize(
    ("method", "directions", "said"),
    [
        (Local(lr=0.1), ("up", "down"), "it acts up and down, and Local sends nothing; leave it"),
        (
            FedAvg(lr=0.1),
            ("peer",),
            'FedAvg sends down and up; give it directions = ["down", "up"]',
        ),
        (FedAvg(lr=0.1), ("peer", "up"), None),
    ],
)
def test_a_channel_where_nothing_is_sent_is_noted(
    method: Any, directions: Any, said: str | None
) -> None:
    channels = [fedstill.EightBit(directions=directions)]
    run = fedstill.run(experiment(method, rounds=1, channels=channels))
    warnings = [note.text for note in run.notes if note.kind == "warning"]
    assert len(warnings) == (said is not None)
    assert said is None or (
        said in warnings[0] and warnings[0].startswith("EightBit codes nothing")
    )


def test_a_sampler_of_any_class_with_other_values_is_not_gone_on_with(tmp_path: Path) -> None:
    place: dict[str, Any] = {"execution": HERE, "folder": tmp_path / "run", "pictures": False}
    same = First(2)
    fedstill.run(experiment(rounds=1, sampling=same), **place)
    with pytest.raises(RunFolderError, match=r"federation\.sampling\.count was 2, not 1"):
        fedstill.run(experiment(rounds=2, sampling=First(1)), **place, resume=True)
    run = fedstill.run(experiment(rounds=2, sampling=same), **place, resume=True)
    whole = fedstill.run(experiment(rounds=2, sampling=First(2)), execution=HERE)
    assert values(run) == values(whole)


def test_the_model_of_a_run_answers_as_it_was_scored() -> None:
    planned = experiment()
    run = fedstill.run(planned, execution=HERE)
    trained = run.model()
    assert trained.weights is not None and trained.network.title.endswith("Net")
    test = planned.population.party(planned.population.clients[0]).test.all()
    right = (trained(test.x).argmax(1) == test.y).double().mean()
    assert float(right) == pytest.approx(run.accuracy_by_round()[3])
    with pytest.raises(
        RunFolderError, match=r"client-00 keeps no model after this run; ask for that of server: "
    ):
        run.model(planned.population.clients[0])
    with pytest.raises(RunFolderError, match="unknown party 'nobody'"):
        run.model("nobody")


@pytest.mark.parametrize(
    "method, node, holder",
    [
        (fedstill.FedProto(), "server", "client-00"),
        (Local(), "server", "client-00"),
        (fedstill.Scaffold(), "client-01", "server"),
    ],
    ids=["fedproto", "local", "scaffold"],
)
def test_a_party_without_a_model_names_those_that_have_one(
    method: Any, node: str, holder: str
) -> None:
    run = fedstill.run(experiment(method, rounds=1), execution=HERE)
    told = rf"{node} keeps no model after this run; .*{holder}.*: run.model\('{holder}'\)"
    with pytest.raises(RunFolderError, match=told):
        run.model(node)
    run.model(holder)


class Tempered(Scored):
    """Weights and a temperature."""

    temperature: float


@dataclass(frozen=True)
class Warm(FedAvg):
    """Logits are divided by a temperature."""

    def scored_state(self, server: Node[Any]) -> Tempered:
        return Tempered(server.state.weights, 2.0)

    def predict(self, node: Node[Any], x: torch.Tensor) -> torch.Tensor:
        return super().predict(node, x) / node.state.temperature


def test_a_model_that_is_more_than_weights_answers_as_it_was_scored_too() -> None:
    planned = experiment(Warm(lr=0.1))
    run = fedstill.run(planned, execution=HERE)
    test = planned.population.party(planned.population.clients[0]).test.all()
    loss = torch.nn.functional.cross_entropy(run.model()(test.x), test.y)
    assert float(loss) == pytest.approx(run.metric_by_round("loss")[3])


def test_a_number_that_a_run_has_not_is_refused_with_the_nearest_that_it_has() -> None:
    run = fedstill.run(experiment(), execution=HERE)
    assert run.series("loss", step="update") and run.series("loss", step="learn") == {}
    with pytest.raises(BadValue, match="unknown series 'losss'; did you mean 'loss'\\? known: acc"):
        run.series("losss")
    with pytest.raises(BadValue, match="unknown metric 'los'; did you mean 'loss'"):
        run.metric_by_round("los")
    never = replace(run, metrics=[])
    assert never.accuracy_by_round() == never.series("accuracy") == {}


def test_traffic_is_counted_by_known_words_alone() -> None:
    run = fedstill.run(experiment(rounds=1), execution=HERE)
    up = run.traffic_by_round("bytes", direction="up")
    assert sum(run.traffic_by_round("bytes", "said", cumulative=True).values()) > sum(up.values())
    words: list[Any] = ["bites", "herd", "upp"]
    with pytest.raises(BadValue, match=r"kind 'bites'; did you mean 'bytes'\?") as fault:
        run.traffic_by_round(*words)
    assert len(fault.value.faults) == 3


def test_a_clients_own_model_is_had_by_its_name() -> None:
    planned = experiment(Local(lr=0.1))
    run = fedstill.run(planned, execution=HERE)
    client = planned.population.clients[1]
    test = planned.population.party(client).test.all()
    right = (run.model(client)(test.x).argmax(1) == test.y).double().mean()
    assert float(right) == pytest.approx(run.summary["local_accuracy_by_client"][client])


def test_a_run_in_a_folder_equals_one_in_memory_and_is_read_back(tmp_path: Path) -> None:
    alone = fedstill.run(experiment(), execution=HERE)
    kept = fedstill.run(experiment(), execution=HERE, folder=tmp_path / "run", pictures=False)
    assert values(kept) == values(alone) and kept.messages == list(alone.messages)
    again = fedstill.read(tmp_path / "run")
    assert again.summary == kept.summary and values(again) == values(kept)
    weights = kept.model().weights
    assert weights is not None
    for name, tensor in (alone.model().weights or {}).items():
        assert torch.equal(tensor, weights[name])
    with pytest.raises(RunFolderError, match=r"begun from Python.*fedstill.read\(folder, exper"):
        again.model()
    assert fedstill.read(tmp_path / "run", experiment=experiment()).model().weights is not None
    written = json.loads((tmp_path / "run" / "experiment.json").read_text())
    assert written["method"]["name"] == "fedavg" and written["method"]["lr"] == 0.1
    assert written["models"]["server"]["name"].endswith(":Net")


def test_a_run_that_goes_on_equals_an_unbroken_one_bit_for_bit(tmp_path: Path) -> None:
    whole = fedstill.run(experiment(rounds=4), execution=HERE, folder=tmp_path / "whole")
    first = fedstill.run(experiment(rounds=2), execution=HERE, folder=tmp_path / "part")
    assert list(first.accuracy_by_round()) == [1, 2]
    both = fedstill.run(experiment(rounds=4), execution=HERE, folder=tmp_path / "part", resume=True)
    assert values(both) == values(whole)
    assert last_weights(tmp_path / "part") == last_weights(tmp_path / "whole") != {}
    assert metrics(tmp_path / "part") == metrics(tmp_path / "whole")
    ended = fedstill.run(
        experiment(rounds=4), execution=HERE, folder=tmp_path / "part", resume=True
    )
    assert values(ended) == values(whole)


def test_resume_begins_where_nothing_is_and_needs_a_folder(tmp_path: Path) -> None:
    folder = tmp_path / "new"
    run = fedstill.run(experiment(rounds=1), execution=HERE, folder=folder, resume=True)
    assert run.summary["rounds"] == 1
    with pytest.raises(RunFolderError, match="a run goes on from its folder"):
        fedstill.run(experiment(rounds=1), resume=True)
    with pytest.raises(
        RunFolderError, match=r"already holds a run; continue it with `fedstill.run\("
    ):
        fedstill.run(experiment(rounds=1), execution=HERE, folder=folder)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda e: replace(e, method=FedAvg(lr=0.2, batch_size=8)), "method.lr was 0.1, not 0.2"),
        (lambda e: replace(e, seed=1), "run.seed was 0, not 1"),
        (
            lambda e: replace(e, population=population(1)),
            "content.content: the examples, or who holds them, are others",
        ),
        (
            lambda e: replace(e, population=Population(e.population.data, fedstill.MLP)),
            ":Net', not 'mlp'",
        ),
        (lambda e: replace(e, sampling=fedstill.Sample(count=2)), "federation.sampling.name was"),
    ],
)
def test_other_values_are_refused_with_what_differs(tmp_path: Path, change: Any, said: str) -> None:
    planned = experiment(rounds=1)
    fedstill.run(planned, execution=HERE, folder=tmp_path / "run", pictures=False)
    before = contents(tmp_path / "run")
    with pytest.raises(RunFolderError, match="cannot be resumed with other values") as refused:
        fedstill.run(change(planned), execution=HERE, folder=tmp_path / "run", resume=True)
    assert said in str(refused.value)
    assert contents(tmp_path / "run") == before


def test_the_command_reads_such_folders_and_says_how_to_go_on(tmp_path: Path) -> None:
    for seed in (0, 1):
        fedstill.run(
            experiment(rounds=1, seed=seed), execution=HERE, folder=tmp_path / f"{seed}",
            pictures=False, label="mine",
        )  # fmt: skip
    for name in ("compare", "curves"):
        assert "mine" in command(name, tmp_path).out
    assert "over seeds 0, 1" in command("compare", tmp_path).out  # two seeds of one setting
    refused = command("resume", tmp_path / "0")
    assert refused.code == 2 and "begun from Python" in refused.err
    recipe = write_recipe(tmp_path / "recipe")
    command("run", recipe, "run.rounds=1", "--out", tmp_path / "r")
    with pytest.raises(RunFolderError, match="holds the run of a recipe; continue it with `fe"):
        fedstill.run(experiment(), execution=HERE, folder=tmp_path / "r", resume=True)
    assert fedstill.read(tmp_path / "r").model().weights is not None


def test_runs_are_compared_and_drawn_together(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    runs = [
        fedstill.run(experiment(method, rounds=2), execution=HERE)
        for method in (FedAvg(lr=0.1), Local(lr=0.1))
    ]
    found = fedstill.compare(runs)
    assert [group.name for group in found.groups] == ["fedavg", "local"]
    assert "<table>" in found._repr_html_() and "fedavg" in found.as_markdown()
    assert fedstill.plot(runs, tmp_path / "by.png") == tmp_path / "by.png"
    figure: Any = fedstill.plot(runs, by="bytes")
    assert figure._repr_png_().startswith(b"\x89PNG")
    assert len(runs[0].plot().axes) == 1
    with pytest.raises(RunFolderError, match="by: unknown axis 'time'"):
        fedstill.plot(runs, by="time")  # type: ignore[arg-type]


def test_a_comparison_is_printed_as_its_table_and_shown_in_a_line() -> None:
    run = fedstill.run(experiment(rounds=1), execution=HERE)
    table = fedstill.compare([run, run])
    assert str(table) == table.as_markdown().rstrip() and "| fedavg |" in str(table)
    assert repr(table) == "<Comparison of fedavg; print() shows the table>"
    assert "a run of fedavg with seed 0 has the setting and seed of a run of" in str(table)


def test_progress_that_is_printed_is_a_line() -> None:
    told: list[str] = []
    fedstill.run(experiment(rounds=1), execution=HERE, watch=lambda p: told.append(str(p)))
    assert told[0] == "round 0 of 1, 0 bytes sent, 0.0 s in this round"
    assert told[1].startswith("round 1 of 1, accuracy 0.") and " bytes sent, " in told[1]


def test_progress_shows_accuracy_where_the_first_metric_has_a_number_for_each_class() -> None:
    told: list[str] = []
    planned = experiment(rounds=1, metrics=["recall"])
    fedstill.run(planned, execution=HERE, watch=lambda p: told.append(str(p)))
    assert told[1].startswith("round 1 of 1, accuracy 0.")


def test_a_folder_of_runs_is_compared_and_plotted_as_all_of_them(tmp_path: Path) -> None:
    for seed in (0, 1):
        place = tmp_path / "runs" / f"seed-{seed}"
        planned = experiment(rounds=1, seed=seed)
        fedstill.run(planned, execution=HERE, folder=place, pictures=False)
    (group,) = fedstill.compare(tmp_path / "runs").groups
    assert group.seeds == ("0", "1")
    figure: Any = fedstill.plot([str(tmp_path / "runs")])
    assert "over 2 seeds" in figure.axes[0].get_title(loc="left")


def test_the_state_dict_of_a_run_loads_into_a_module_built_elsewhere() -> None:
    run = fedstill.run(experiment(rounds=1), execution=HERE)
    net, x = Net(), torch.from_numpy(arrays()[0])
    net.load_state_dict(run.model().state_dict())
    assert torch.equal(net.eval()(x), run.model()(x))


def test_a_run_in_memory_gives_the_pictures_that_a_folder_would_hold(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rng = np.random.default_rng(0)
    images, labels = rng.integers(0, 255, (24, 1, 8, 8)).astype(np.uint8), np.arange(24) % 3
    data = fedstill.split(images, labels, partition=fedstill.Iid(2))
    method = fedstill.FedDM(**fedstill.FedDM.presets["small"])
    planned = Experiment(method, Population(data, fedstill.MLP), rounds=1)
    run = fedstill.run(planned, execution=HERE)
    kept = fedstill.run(planned, execution=HERE, folder=tmp_path / "run")
    names = [path.name for path in kept.pictures]
    assert {"accuracy-by-round.png", "partition.png", "synthetic-client-00.png"} <= set(names)
    assert len(run.pictures) == len(names)
    assert all(figure._repr_png_().startswith(b"\x89PNG") for figure in run.pictures)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


class Sharing(fedstill.Local):
    """Clients' models are scored, and yet must all be of one network."""

    @property
    def one_network(self) -> bool:
        return True


class Apart(FedAvg):
    """The server's model is scored, and clients may have other networks."""

    @property
    def one_network(self) -> bool:
        return False


class Asking(Apart):
    """Clients log how wide the server's network is, and send weights of it."""

    @at_clients
    async def update(self, client: Node[Any], inbox: Inbox[Down]) -> Up:
        """Look, and send back what came."""
        client.log(width=client.server_model.feature_width, own=client.model.feature_width)
        return Up(inbox.only().weights, len(client.data))

    def network_for(self, node: Node[Any], who: NodeId) -> Model:
        return node.server_model


def test_a_client_knows_the_servers_network_which_may_be_another_than_its_own() -> None:
    data = population().data
    assert data is not None
    people = Population(data, partial(MLP, hidden=(7,)), server=partial(MLP, hidden=(3,)))
    run = fedstill.run(Experiment(Asking(), people, rounds=1))
    logged = {row.name: row.value for row in run.metrics if row.step == "update"}
    assert (logged["width"], logged["own"]) == (3, 7)
    assert run.model().weights["head.weight"].shape[1] == 3


def test_what_does_not_fit_is_refused_when_the_experiment_is_made() -> None:
    people = population()
    with pytest.raises(BadValue, match="sampling: count = 9, but there are 3 clients"):
        Experiment(FedAvg(), people, sampling=fedstill.Sample(count=9))
    with pytest.raises(BadValue, match="topology: Star: DeSA speaks from client to client"):
        Experiment(fedstill.DeSA(), people, topology=fedstill.Star())
    with pytest.raises(BadValue, match="topology: Ring: neighbours = 7"):
        Experiment(fedstill.DeSA(), people, topology=fedstill.Ring(7))
    with pytest.raises(BadValue, match="public: FedDF needs public data"):
        Experiment(fedstill.FedDF(), people)
    with pytest.raises(BadValue, match="rounds = -1: must be at least 0"):
        Experiment(FedAvg(), people, rounds=-1)
    with pytest.raises(BadValue, match="population must be a Population, not a Collection"):
        Experiment(FedAvg(), people.data)  # type: ignore[arg-type]
    mixed = Population(people.data, Net, networks={people.clients[0]: fedstill.MLP})  # type: ignore[arg-type]
    with pytest.raises(BadValue, match="networks: FedAvg averages one network"):
        Experiment(FedAvg(), mixed)
    with pytest.raises(BadValue, match="networks: Sharing averages one network"):
        Experiment(Sharing(), mixed)
    assert Experiment(Apart(), mixed).method == Apart()


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("sampling", 0.5, r"^sampling = 0.5: must be Sampler, such as Sample\(share=0.1\)$"),
        ("topology", "ring", r"^topology = 'ring': must be Topology, such as Ring\(2\)$"),
        ("privacy", 4, r"^privacy = 4: must be Privacy, such as Privacy\(epsilon=4\)$"),
        ("clock", 4, r"^clock = 4: must be Clock, such as Clock\(speed=1e9, up=1e6\)$"),
        ("channels", ["half"], r"^channels\[0\]: 'half' is not a Channel, such as Half\(\);"),
        (
            "metrics",
            "accuracy",
            r"^metrics must be a list, such as \['accuracy'\], not 'accuracy'$",
        ),
    ],
)
def test_a_word_or_number_in_place_of_an_object_is_told_what_to_write(
    field: str, value: Any, says: str
) -> None:
    with pytest.raises(BadValue, match=says):
        Experiment(FedAvg(), population(), **{field: value})


def test_the_examples_of_such_messages_can_be_made() -> None:
    for text in SUCH.values():
        name, _, _ = text.removeprefix("[").partition("(")
        assert eval(text, {name: getattr(fedstill, name)})


def test_arrays_in_place_of_data_are_told_of_split() -> None:
    with pytest.raises(BadValue, match=r"^data must be what fedstill.split.* not a tuple$"):
        Population((np.zeros((4, 2)), [0, 1, 0, 1]), Net)  # type: ignore[arg-type]


def test_a_run_of_no_rounds_is_refused_as_a_recipe_is(tmp_path: Path) -> None:
    with pytest.raises(BadValue, match=r"^rounds = 0: must be at least 1$"):
        fedstill.run(experiment(rounds=0), folder=tmp_path / "none")
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"checkpoint_every": 0}, r"^checkpoint_every = 0: must be at least 1$"),
        ({"keep_checkpoints": 0}, r"^keep_checkpoints = 0: must be at least 1$"),
        ({"pictures": "maybe"}, r"^pictures = 'maybe': "),
        (
            {"execution": "cpu"},
            r"^execution must be an Execution, not 'cpu'; write Execution\(…\)$",
        ),
    ],
)
def test_what_a_run_cannot_do_is_refused_before_it_begins(
    tmp_path: Path, options: Any, says: str
) -> None:
    with pytest.raises(BadValue, match=says):
        fedstill.run(experiment(), folder=tmp_path / "none", **options)
    assert not (tmp_path / "none").exists()
    with pytest.raises(BadValue, match=r"^run plays an Experiment.*, not a Population$"):
        fedstill.run(population())  # type: ignore[arg-type]


def test_clients_are_joined_as_the_method_needs() -> None:
    people = population()
    names = people.clients
    star, complete = (Experiment(m, people).graph for m in (FedAvg(), fedstill.DeSA()))
    assert [len(star.neighbours[name]) for name in names] == [0, 0, 0]
    assert [len(complete.neighbours[name]) for name in names] == [2, 2, 2]


@pytest.mark.parametrize(
    ("given", "write"),
    [
        (Local, r"such as Local\(\), not .*; write Local\("),
        ("fedavg", r"such as FedAvg\(\), not 'fed"),
    ],
)
def test_a_class_or_a_name_in_place_of_a_method_is_told_what_to_write(
    given: Any, write: str
) -> None:
    with pytest.raises(BadValue, match=f"method must be a Method, {write}"):
        Experiment(given, population())


def test_labels_that_count_from_one_are_told_where_a_network_does_not_fit() -> None:
    x, y = arrays()
    with pytest.raises(BadValue, match="gives 3 logits for 4 classes") as refused:
        Population(fedstill.split(x, y + 1), Net)
    assert "no example has the label 0 of 4 classes" in str(refused.value)
    with pytest.raises(BadValue, match="gives 3 logits for 5 classes") as refused:
        Population(fedstill.split(x, np.where(y == 2, 4, y)), Net)
    assert "label 0" not in str(refused.value)


def test_a_model_takes_arrays_and_doubles_and_refuses_bytes_with_a_reason() -> None:
    model = fedstill.run(experiment(rounds=1), execution=HERE).model()
    x = arrays()[0][:4]
    wanted = model(torch.from_numpy(x))
    assert torch.equal(model(x), wanted)
    assert torch.equal(model(torch.from_numpy(x).double()), wanted)
    with pytest.raises(
        BadValue, match=r"floats as a client normalises its own, but are torch\.uint8"
    ):
        model(x.astype(np.uint8))


def test_data_and_populations_show_themselves_in_a_line() -> None:
    data = fedstill.split(*arrays(), partition=fedstill.Iid(3))  # a fifth of 90 is 18
    shown = (
        "<Collection arrays: 3 clients, 72 examples to train on, 18 to test on, 3 classes, "
        "inputs of 3>"
    )
    assert repr(data) == shown
    run = fedstill.run(Experiment(FedAvg(), Population(data, Net), rounds=1), execution=HERE)
    assert repr(run) == "<Run label fedavg, data arrays, seed 0, rounds 1, in memory>"
    mixed = Population(data, fedstill.MLP, networks={"client-00": Net})
    assert repr(mixed) == f"<Population of 3 with Net, mlp; data: {shown}>"


def test_an_instance_drawn_anew_goes_on_in_a_process_that_built_another(tmp_path: Path) -> None:
    data = fedstill.split(*arrays(), partition=fedstill.Iid(3))

    def play(rounds: int, folder: str, start: Any, shift: float = 0.0) -> Any:
        net = Net()  # other values each time, as in another process
        if start == "given":
            torch.nn.init.constant_(net.layers[0].bias, shift)
        whole = Population(data, fedstill.Module((3,), 3, net, start=start))
        planned = Experiment(FedAvg(lr=0.1), whole, rounds=rounds)
        return fedstill.run(
            planned, execution=HERE, folder=tmp_path / folder, resume=True, pictures=False
        )

    play(1, "fresh", "fresh")
    gone_on, unbroken = play(2, "fresh", "fresh"), play(2, "whole", "fresh")
    assert gone_on.accuracy_by_round() == unbroken.accuracy_by_round()
    play(1, "given", "given")
    with pytest.raises(RunFolderError, match="the network's code, layers or fixed values"):
        play(2, "given", "given", shift=1.0)
