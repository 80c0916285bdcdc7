"""Trackers: the logbook's events, read back from what each library wrote."""

from __future__ import annotations

from time import sleep

import numpy as np
import pytest

from fedstill import FedAvg
from fedstill.core.errors import BadValue, FedstillError, RecipeError, RunFolderError
from fedstill.data import Iid, split
from fedstill.federation.experiment import Experiment
from fedstill.federation.population import Population
from fedstill.logbook import MemoryLog, Note, Number, Traffic
from fedstill.models import MLP
from fedstill.recipe.check import checked
from fedstill.runs import recipes as runs
from fedstill.runs import track
from fedstill.runs.run import run
from fedstill.runs.track import Round, TrackedLog
from small_recipes import fedstill, metrics, tables, write_recipe


class Kept:
    def __init__(self):
        self.rounds, self.notes, self.ends = {}, [], []

    def numbers(self, round, values):
        self.rounds[round] = dict(values)

    def note(self, round, kind, text):
        self.notes.append((round, kind, text))

    def end(self, finished):
        self.ends.append(finished)


def test_a_round_is_handed_over_when_it_is_complete_as_means_and_sums():
    kept, log = Kept(), MemoryLog()
    tracked = TrackedLog(log, {"kept": kept})
    tracked.write(Note(0, "engine", "", "in_process"))
    tracked.write(Traffic(0, "share", "a", "peer", "anchors", 2, 8, 1))
    for node, loss in (("a", 1.0), ("b", 3.0)):
        tracked.write(Number(1, "learn", node, "loss", "", loss))
        tracked.write(Traffic(1, "learn", node, "up", "weights", 10, 40, 1))
    for target, value in (("a", 0.25), ("b", 0.75), ("c", float("nan"))):
        tracked.write(Number(1, "evaluate", "server", "accuracy", target, value))
    assert kept.rounds == {}
    tracked.write(Number(1, "round", "", "seconds", "", 2.0))
    assert kept.notes == [(0, "engine", "in_process")]
    assert kept.rounds[0] == {"bytes/peer": 8}
    assert kept.rounds[1] == {
        "learn/loss": 2.0, "evaluate/accuracy": 0.5, "accuracy by test set/a": 0.25,
        "accuracy by test set/b": 0.75, "bytes/up": 80, "round/seconds": 2.0,
    }  # fmt: skip
    assert len(log.metrics) == 6 and Round().values() == {}


class Failing(Kept):
    """Takes one round and fails from then on."""

    def __init__(self, *about):
        super().__init__()

    def numbers(self, round, values):
        if round > 1:
            raise ConnectionError("the server hung up")
        super().numbers(round, values)

    def note(self, round, kind, text):
        assert round <= 1, "it is told no more"


def test_a_tracker_that_fails_is_told_no_more_and_the_run_and_the_others_go_on(
    tmp_path, monkeypatch
):
    kept = Kept()
    monkeypatch.setitem(track.TRACKERS, "mlflow", Failing)
    monkeypatch.setitem(track.TRACKERS, "tensorboard", lambda *about: kept)
    monkeypatch.setattr(track, "import_module", lambda name: None)
    made = of_objects(tmp_path, rounds=3, track=["mlflow", "tensorboard"])
    text = "the tracker mlflow failed and is told no more: ConnectionError: the server hung up"
    assert [(note.round, note.text) for note in made.notes if note.kind == "warning"] == [(2, text)]
    assert (2, "warning", text) in kept.notes
    assert list(kept.rounds) == [1, 2, 3] == list(made.accuracy_by_round())


def test_a_tracker_hears_whether_the_run_has_finished_or_was_stopped(tmp_path, monkeypatch):
    kept = Kept()
    monkeypatch.setitem(track.TRACKERS, "tensorboard", lambda *about: kept)
    monkeypatch.setattr(track, "import_module", lambda name: None)

    def stop(progress):
        if progress.round == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        of_objects(tmp_path, rounds=3, track=["tensorboard"], watch=stop)
    assert kept.ends == [False]
    of_objects(tmp_path, rounds=3, track=["tensorboard"], resume=True)
    assert kept.ends == [False, True]


def test_a_tracker_that_cannot_begin_is_refused_in_words(tmp_path, monkeypatch):
    def unreachable(*about):
        raise ConnectionError("no route to host")

    monkeypatch.setitem(track.TRACKERS, "tensorboard", unreachable)
    monkeypatch.setattr(track, "import_module", lambda name: None)
    with pytest.raises(FedstillError, match=r"tensorboard that .* ConnectionError: no route to"):
        of_objects(tmp_path, track=["tensorboard"])


def scalars(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder / "track" / "tensorboard"))
    found.Reload()
    return {tag: {e.step: e.value for e in found.Scalars(tag)} for tag in found.Tags()["scalars"]}


def of_objects(tmp_path, rounds=2, **options):
    x, y = np.eye(40, 4), np.arange(40) % 2
    people = Population(split(x, y, partition=Iid(2)), MLP)
    return run(Experiment(FedAvg(), people, rounds=rounds), folder=tmp_path / "run", **options)


def test_a_run_of_objects_is_tracked_by_name_and_goes_on_in_the_same_place(tmp_path):
    pytest.importorskip("tensorboard")
    of_objects(tmp_path, track=["tensorboard"])
    made = of_objects(tmp_path, rounds=3, resume=True, track="tensorboard")
    found = scalars(tmp_path / "run")["evaluate/accuracy"]
    assert found == pytest.approx(made.accuracy_by_round())


def test_a_tracker_of_objects_must_be_known_and_needs_a_folder(tmp_path):
    with pytest.raises(BadValue, match="track: unknown tracker 'tensorbord'; did you mean"):
        of_objects(tmp_path, track=["tensorbord"])
    people = Population(split(np.eye(40, 4), np.arange(40) % 2, partition=Iid(2)), MLP)
    with pytest.raises(RunFolderError, match="lies in the run's folder; give one"):
        run(Experiment(FedAvg(), people), track=["tensorboard"])


def test_tensorboard_shows_the_runs_numbers_also_after_a_stop(tmp_path):
    pytest.importorskip("tensorboard")
    recipe = write_recipe(tmp_path, track={"to": ["tensorboard"]})
    assert fedstill("run", recipe, "run.rounds=2", "--out", tmp_path / "run").code == 0
    assert fedstill("resume", tmp_path / "run", "run.rounds=3").code == 0
    found = scalars(tmp_path / "run")
    read = runs.recipe_of(tmp_path / "run")
    assert read.track is not None and read.track.to == ("tensorboard",)
    from fedstill.logbook import read_run

    expected = read_run(tmp_path / "run").accuracy_by_round()
    assert found["evaluate/accuracy"] == pytest.approx(expected)
    assert set(found["bytes/up"]) == {1, 2, 3}
    plain = write_recipe(tmp_path)
    assert fedstill("run", plain, "--out", tmp_path / "plain").code == 0
    assert metrics(tmp_path / "plain") == metrics(tmp_path / "run")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the libraries that MLflow uses
def test_mlflow_has_the_same_numbers_in_a_store_of_the_folder(tmp_path):
    tracking = pytest.importorskip("mlflow.tracking", reason="mlflow is not installed")
    recipe = write_recipe(tmp_path, track={"to": ["mlflow"], "project": "mine"})
    said = fedstill("run", recipe, "run.rounds=2", "--out", tmp_path / "run")
    assert said.code == 0, said.err
    client = tracking.MlflowClient(f"sqlite:///{tmp_path / 'run' / 'track' / 'mlflow.db'}")
    (run,) = client.search_runs([client.get_experiment_by_name("mine").experiment_id])
    history = client.get_metric_history(run.info.run_id, "evaluate/accuracy")
    assert [entry.step for entry in history] == [1, 2]
    assert run.data.params["method.lr"] == "0.05" and run.info.status == "FINISHED"


def test_wandb_leaves_an_offline_run_in_the_folder(tmp_path):
    pytest.importorskip("wandb", reason="wandb is not installed")
    recipe = write_recipe(tmp_path, track={"to": ["wandb"]})
    said = fedstill("run", recipe, "run.rounds=2", "--out", tmp_path / "run")
    assert said.code == 0, said.err
    (written,) = (tmp_path / "run" / "track").rglob("*.wandb")
    for _ in range(100):  # its process may still write when `finish` has returned
        content = written.read_bytes()
        if b"evaluate/accuracy" in content:
            break
        sleep(0.1)
    assert b"evaluate/accuracy" in content and b"fedavg seed 0" in content


def test_an_unknown_tracker_is_refused_with_the_nearest(tmp_path):
    made = {**tables(tmp_path), "track": {"to": ["tensorbord"]}}
    with pytest.raises(RecipeError, match="did you mean 'tensorboard'"):
        checked(made)


def test_a_tracker_that_is_not_installed_is_said_before_the_run(tmp_path, monkeypatch):
    def missing(name):
        raise ImportError(name)

    monkeypatch.setattr(track, "import_module", missing)
    recipe = write_recipe(tmp_path, track={"to": ["wandb"]})
    said = fedstill("run", recipe, "--out", tmp_path / "run")
    assert said.code == 2 and "pip install 'fedstill[wandb]'" in said.err
    assert not (tmp_path / "run").exists()
