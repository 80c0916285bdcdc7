"""Simulated time: arithmetic one can redo, stragglers, and the same clock in every engine."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fedstill
import worlds
from fedstill.core import SERVER
from fedstill.core.errors import BadValue, RecipeError
from fedstill.core.work import Work
from fedstill.engines.execution import Execution
from fedstill.engines.play.batched import Batched
from fedstill.engines.play.streams import Streams
from fedstill.engines.play.together import Together
from fedstill.federation.cache import FolderCache
from fedstill.federation.clock import Clock, LogNormal, Uniform
from fedstill.federation.run import rounds_of, run, run_together
from fedstill.federation.sampling import Scripted
from fedstill.federation.timeline import Parcel, Timeline
from fedstill.logbook.writer import MemoryLog
from fedstill.methods import METHODS, FedAvg
from fedstill.methods.local import Local
from fedstill.models import MLP, Module
from fedstill.recipe.build import experiment_of
from fedstill.recipe.check import checked
from fedstill.runs.digest import decisive
from fedstill.testing import small
from fedstill.testing.walls import behind_walls
from small_recipes import fedstill as command
from small_recipes import tables, write_recipe

STEADY = Clock(speed=2, up=10, down=5, latency=0.5, work="steps")
LINKS: Any = {"up": Uniform(100, 1000), "down": 500}
UNEVEN = Clock(speed=LogNormal(1e6, 1.0), **LINKS)
BY_STEPS = Clock(speed=LogNormal(10.0, 1.0), work="steps", **LINKS)


def times(log: MemoryLog) -> dict[int, float]:
    return {row.round: row.value for row in log.metrics if row.name == "clock"}


def clock_rows(log: MemoryLog) -> list[tuple[Any, ...]]:
    return [
        (row.round, row.node, row.value) for row in log.metrics if row.name in ("clock", "busy")
    ]


def exchange(time: Timeline, steps: Mapping[str, int]) -> dict[Parcel, float]:
    """The server sends 20 bytes to each, who works and answers with ten."""
    time.begin([*steps])
    time.hear(time.carry([Parcel(SERVER, client, 20) for client in steps]), [])
    time.work({client: Work(steps=count) for client, count in steps.items()})
    return time.carry([Parcel(client, SERVER, 10) for client in steps])


def test_a_round_lasts_as_long_as_its_slowest_client() -> None:
    """Down 20/5 + 0.5 s, work 4/2 or 8/2 s, up 10/10 + 0.5 s: eight and ten seconds."""
    time = Timeline(STEADY, ["a", "b"], seed=0)
    arrivals = exchange(time, {"a": 4, "b": 8})
    assert {parcel.sender: there for parcel, there in arrivals.items()} == {"a": 8.0, "b": 10.0}
    time.hear(arrivals, [])
    time.end()
    assert time.now == 10.0
    assert time.taken() == {"a": 4 + 2 + 1, "b": 4 + 4 + 1}
    exchange(time, {"a": 4, "b": 8})
    assert time.ready[SERVER] == 10.0, "the next round begins when this one is over"


@pytest.mark.parametrize(
    ("clock", "counted"),
    [
        (Clock(speed=1e6), True), (Clock(server_speed=1e6), True),
        (Clock(speed=1e6, work="steps"), False), (Clock(up=1e6), False),
    ],
)  # fmt: skip
def test_operations_are_counted_where_somebodys_take_time(clock: Clock, counted: bool) -> None:
    assert clock.counts_operations is counted


def test_the_server_waits_until_the_deadline_and_no_longer() -> None:
    time = Timeline(Clock(speed=2, work="steps", deadline=3), ["a", "b"], seed=0)
    arrivals = exchange(time, {"a": 4, "b": 8})
    late = time.late(arrivals)
    assert late == {Parcel("b", SERVER, 10): 4.0}
    time.hear(arrivals, ["b"])
    time.end()
    assert time.now == 3.0


def test_messages_queue_on_the_servers_link() -> None:
    """Ten bytes at two a second: a's from 2 s to 7 s; b's, ready at 4 s, behind it, to 12 s."""
    time = Timeline(Clock(speed=2, work="steps", server_down=2), ["a", "b"], seed=0)
    arrivals = exchange(time, {"a": 4, "b": 8})
    assert {parcel.sender: there for parcel, there in arrivals.items()} == {"a": 7.0, "b": 12.0}


def test_peers_send_one_message_after_another() -> None:
    """Two hearers, ten bytes each at ten a second: the first has it after 1 s, the next after 2."""
    time = Timeline(Clock(up=10), ["a", "b", "c"], seed=0)
    time.begin(["a", "b", "c"])
    arrivals = time.carry([Parcel("a", "b", 10), Parcel("a", "c", 10)])
    assert [*arrivals.values()] == [1.0, 2.0]


def test_operations_are_those_of_products_there_and_back() -> None:
    """An MLP 4-8-3, one epoch of n examples: forwards 2n(32 + 24), back again and 2n·24 more."""
    _, log = worlds.played(FedAvg(batch_size=8), worlds.vectors(), 1, clock=Clock(speed=1.0))
    busy = {row.node: row.value for row in log.metrics if row.name == "busy"}
    assert busy == {
        client: 2 * n * (2 * 56 + 24)
        for client, n in zip(("c0", "c1", "c2", "c3"), (20, 27, 23, 30), strict=True)
    }


def test_a_clock_changes_nothing_but_its_own_rows() -> None:
    world = worlds.vectors()
    plain, before = worlds.played(FedAvg(), world, 2)
    timed, log = worlds.played(FedAvg(), world, 2, clock=UNEVEN)
    assert all(map(torch.equal, *(e.memory(SERVER).weights.values() for e in (plain, timed))))
    assert log.messages == before.messages and log.notes == before.notes
    kept = [row for row in log.metrics if row.name not in ("clock", "busy", "seconds")]
    assert kept == [row for row in before.metrics if row.name != "seconds"]
    assert not times(before)


@pytest.mark.parametrize(
    ("name", "clock"), [("fedavg", UNEVEN), ("feddm", BY_STEPS), ("desa", BY_STEPS)]
)
def test_the_clock_is_the_same_in_every_engine(name: str, clock: Clock) -> None:
    method = METHODS[name](**METHODS[name].presets["small"])
    world = worlds.pictures()
    _, log = worlds.played(method, world, 1, clock=clock, seed=3)
    wanted = clock_rows(log)
    assert times(log)[1] > 0
    for engine in (Batched, Streams):
        _, other = worlds.played(method, world, 1, engine, clock=clock, seed=3)
        assert clock_rows(other) == wanted
    with behind_walls(method, world, clock=clock, seed=3, rounds=1) as leader:
        run(leader, far := MemoryLog())
    assert clock_rows(far) == wanted
    _, other = worlds.played(method, world, 1, clock=clock, seed=4)
    assert clock_rows(other) != wanted


def test_federations_together_keep_their_own_clocks() -> None:
    made = [
        worlds.experiment(FedAvg(batch_size=8), worlds.pictures(sizes), 1, clock=UNEVEN)
        for sizes in ((20, 27, 23), (12, 30, 9))
    ]
    together = Together(made, Execution(device="cpu", engine="batched"))
    logs = [MemoryLog() for _ in made]
    run_together(together, [rounds_of(*pair) for pair in zip(together.engines, logs, strict=True)])
    for experiment, log in zip(made, logs, strict=True):
        _, alone = worlds.played(experiment.method, experiment.population, 1, clock=UNEVEN)
        assert clock_rows(log) == clock_rows(alone)


@pytest.mark.parametrize("name", ["feddm", "dfrd"])
def test_every_kind_of_loop_is_counted_without_numbers(name: str) -> None:
    method = METHODS[name](**METHODS[name].presets["small"])
    world = worlds.pictures()
    _, log = worlds.played(method, world, 1, clock=Clock(speed=1e6, server_speed=1e6))
    assert times(log)[1] > 0


def test_what_is_found_out_of_a_module_while_operations_are_counted_is_not_counted() -> None:
    def seconds(*, known: bool) -> dict[int, float]:
        net = nn.Sequential(nn.Flatten(), nn.Linear(64, 4), nn.ReLU(), nn.Linear(4, 3))
        model = Module((1, 8, 8), worlds.CLASSES, net)  # another one each time
        assert not known or model.stackable_at_rest
        world = worlds.pictures()
        world.server_model = model
        world.parties = {n: replace(party, model=model) for n, party in world.parties.items()}
        clock = Clock(speed=1e6, server_speed=1e6)
        _, log = worlds.played(small(METHODS["dense"]), world, 1, clock=clock)
        return times(log)

    assert seconds(known=False) == seconds(known=True)


def test_a_cached_warm_up_takes_its_time_all_the_same(tmp_path: Path) -> None:
    method = METHODS["desa"](**METHODS["desa"].presets["small"])
    found = []
    for _ in range(2):
        cache = FolderCache(tmp_path)
        _, log = worlds.played(method, worlds.pictures(), 1, clock=BY_STEPS, cache=cache)
        found.append(times(log))
    assert found[0] == found[1] and found[0][0] > 0


def test_a_straggler_is_left_out_as_an_absent_client_is() -> None:
    """c3 has the most examples; its 4 steps at one a second are past a deadline of 3.5 s."""
    world, method = worlds.vectors(), FedAvg(batch_size=8)
    clock = Clock(speed=1, work="steps", deadline=3.5)
    timed, log = worlds.played(method, world, 2, clock=clock)
    absent = Scripted({1: ["c1", "c3"], 2: ["c1", "c3"]})
    other, _ = worlds.played(method, world, 2, sampling=absent)
    assert all(map(torch.equal, *(e.memory(SERVER).weights.values() for e in (timed, other))))
    told = [(note.kind, note.node, note.text) for note in log.notes if note.round == 1]
    text = "update: answered after 4 s, past the deadline"
    assert told == [("absent", "c1", text), ("absent", "c3", text)]
    assert times(log) == {1: 3.5, 2: 7.0}
    unheard = {(row.sender, row.hearers) for row in log.messages if row.direction == "up"}
    assert unheard == {("c0", 1), ("c1", 0), ("c2", 1), ("c3", 0)}


def test_a_deadline_that_nobody_keeps_leaves_the_model_as_it_was() -> None:
    world = worlds.vectors()
    start, _ = worlds.played(FedAvg(), world, 0)
    clock = Clock(speed=1, work="steps", deadline=0.25)
    engine, log = worlds.played(FedAvg(), world, 1, clock=clock)
    first = start.node(SERVER, 0, "memory").state.weights
    assert all(map(torch.equal, first.values(), engine.memory(SERVER).weights.values()))
    skipped = [note.text for note in log.notes if note.kind == "skipped"]
    assert skipped == ["FedAvg.aggregate heard nobody; the rest of the round is skipped"]
    assert times(log) == {1: 0.25}


def test_a_peer_that_is_late_for_one_is_heard_by_the_others() -> None:
    """Everybody speaks at once; c1's link alone is too slow for what it hears."""
    desa = METHODS["desa"](**METHODS["desa"].presets["small"])
    down = {"c0": 1e9, "c1": 10.0, "c2": 1e9}
    _, log = worlds.played(desa, worlds.pictures(), 1, clock=Clock(down=down, deadline=1.0))
    late = {(note.node, note.text.split(" came")[0]) for note in log.notes if note.kind == "late"}
    assert late == {(who, "speak: its message to c1") for who in ("c0", "c2")}
    assert times(log)[1] == times(log)[0] + 1.0


def test_a_round_in_which_no_peer_is_heard_in_time_lasts_until_the_deadline() -> None:
    desa = METHODS["desa"](**METHODS["desa"].presets["small"])
    _, log = worlds.played(desa, worlds.pictures(), 2, clock=Clock(up=1.0, deadline=1.0))
    began = times(log)[0]
    assert times(log) == {0: began, 1: began + 1.0, 2: began + 2.0}


def test_work_that_nobody_waits_for_is_not_cut_by_a_deadline() -> None:
    _, log = worlds.played(
        Local(batch_size=8), worlds.vectors(), 1, clock=Clock(speed=1, work="steps", deadline=1.5)
    )
    assert times(log) == {1: 4.0} and not log.notes


def test_laws_are_drawn_by_client_and_seed_alone() -> None:
    few, many = (UNEVEN.paces([f"c{i}" for i in range(n)], seed=1) for n in (3, 2000))
    assert all(few[client] == many[client] for client in few)
    assert UNEVEN.paces(["c0"], seed=2)["c0"] != few["c0"]
    clients = [pace for client, pace in many.items() if client != SERVER]
    logs = torch.tensor([math.log(pace.speed / 1e6) for pace in clients])
    assert abs(float(logs.mean())) < 0.1 and abs(float(logs.std()) - 1.0) < 0.1
    assert min(p.up for p in clients) >= 100 and max(p.up for p in clients) <= 1000
    assert many[SERVER].speed == math.inf


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({}, "nothing would take any time; give at least one of speed, up, down"),
        ({"speed": 0}, "speed = 0: must be above 0"),
        ({"up": -1.0}, "up = -1.0: must be above 0"),
        ({"down": math.nan}, "down = nan: must be a finite number"),
        ({"latency": -0.1}, "latency = -0.1: must be at least 0"),
        ({"speed": "fast"}, "speed = 'fast': must be a number, a law, or a number for each"),
        ({"speed": {"a": 0.0}}, "speed.a = 0.0: must be above 0"),
        ({"speed": 1, "deadline": 0}, "deadline = 0: must be above 0"),
        ({"speed": 1, "work": "hours"}, "work = 'hours': unknown choice 'hours'"),
        ({"speed": Uniform(0, 1)}, "a uniform law from low = 0 would draw clients that never end"),
    ],
)
def test_what_no_clock_can_have_is_refused_by_name(values: dict[str, Any], said: str) -> None:
    with pytest.raises(BadValue) as refused:
        Clock(**values)
    assert said in str(refused.value)


def test_laws_refuse_what_they_cannot_draw() -> None:
    with pytest.raises(BadValue, match=r"Uniform: low = 3 is above high = 2"):
        Uniform(3, 2)
    with pytest.raises(BadValue, match=r"LogNormal: median = 0: must be above 0"):
        LogNormal(0, 1)


def test_numbers_by_client_are_for_these_clients() -> None:
    world = worlds.vectors()
    clock = Clock(speed={"c0": 1.0, "c1": 1.0, "cx": 1.0})
    with pytest.raises(BadValue) as refused:
        worlds.experiment(FedAvg(), world, clock=clock)
    assert "clock: speed: unknown client 'cx'" in str(refused.value)
    assert "clock: speed: no number for c2, c3; give one for each" in str(refused.value)


def clocked(folder: Path, **clock: Any) -> Any:
    (recipe,) = checked(tables(folder, federation={"clock": clock}))
    return recipe


def test_a_recipe_says_numbers_laws_and_a_file(tmp_path: Path) -> None:
    path = tmp_path / "links.csv"
    path.write_text("client,up,down\neast,10,20\nnorth,30,40\nwest,50,60\n")
    recipe = clocked(
        tmp_path, file=str(path), speed={"law": "log-normal", "median": 5, "spread": 1}, deadline=9
    )
    clock = recipe.federation.clock
    assert clock.speed == LogNormal(5, 1) and clock.deadline == 9
    assert clock.up == {"east": 10.0, "north": 30.0, "west": 50.0} and clock.down["west"] == 60
    path.unlink()  # a run's folder needs it no longer: its numbers stand there
    (again,) = checked(recipe.as_tables())
    assert again.federation.clock == clock
    assert experiment_of(again).clock == clock
    assert decisive(again) != decisive(clocked(tmp_path, speed=5))


@pytest.mark.parametrize(
    ("clock", "said"),
    [
        (3, "federation.clock must be a table, not 3"),
        ({"speed": -1}, "federation.clock: speed = -1: must be above 0"),
        ({"speeed": 1}, "federation.clock.speeed: unknown key 'speeed'; did you mean 'speed'?"),
        ({"speed": {"law": "normal"}}, "federation.clock.speed.law: unknown law 'normal'"),
        ({"speed": {"law": "uniform", "low": 1}}, "federation.clock.speed.high is missing"),
        ({"file": "none.csv"}, "federation.clock.file = 'none.csv': cannot be read"),
        ({"file": 3}, "federation.clock.file = 3: must be the name of a CSV file"),
    ],
)
def test_a_recipe_refuses_a_wrong_clock(tmp_path: Path, clock: Any, said: str) -> None:
    with pytest.raises(RecipeError) as refused:
        checked(tables(tmp_path, federation={"clock": clock}))
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("speed\n1\n", "must have the columns client and one or more of speed"),
        ("client,speed,speed\na,1,2\n", "each once"),
        ("client,ping\na,1\n", "unknown column 'ping'"),
        ("client,up\neast,fast\n", "up of east is 'fast', not a number"),
        ("client,up\neast\n", "has 1 cells, not 2"),
        ("client,up\neast,1\neast,2\n", "east stands in two lines"),
        ("client,up\neast,0\nnorth,1\nwest,1\n", "up.east = 0.0: must be above 0"),
        ("client,speed\neast,1\n", "speed stands in the recipe and in"),
    ],
)
def test_a_file_of_clients_is_refused_with_what_is_wrong(
    tmp_path: Path, text: str, said: str
) -> None:
    path = tmp_path / "clients.csv"
    path.write_text(text)
    with pytest.raises(RecipeError) as refused:
        clocked(tmp_path, file=str(path), speed=1.0)
    assert said in str(refused.value)


def test_a_file_that_lacks_a_client_is_refused_with_the_recipes_key(tmp_path: Path) -> None:
    path = tmp_path / "clients.csv"
    path.write_text("client,speed\neast,1\nsouth,2\n")
    recipe = clocked(tmp_path, file=str(path))
    with pytest.raises(RecipeError) as refused:
        experiment_of(recipe)
    assert "federation.clock: speed: unknown client 'south'" in str(refused.value)
    assert "federation.clock: speed: no number for north, west" in str(refused.value)


def test_a_resumed_run_has_the_clock_of_an_unbroken_one(tmp_path: Path) -> None:
    clock = {"speed": {"law": "uniform", "low": 1e5, "high": 1e6}, "up": 1e4, "deadline": 1.0}
    recipe = write_recipe(tmp_path, federation={"clock": clock})
    assert command("run", recipe, "--out", tmp_path / "whole").code == 0
    assert command("run", recipe, "run.rounds=1", "--out", tmp_path / "part").code == 0
    assert command("resume", tmp_path / "part", "run.rounds=3").code == 0
    rows = [
        [row for row in fedstill.read(tmp_path / name).metrics if row.name in ("clock", "busy")]
        for name in ("whole", "part")
    ]
    assert rows[0] == rows[1] and len({row.round for row in rows[0]}) == 3
    whole = fedstill.read(tmp_path / "whole")
    assert whole.summary["simulated_seconds"] == rows[0][-1].value
    shown = command("curves", tmp_path / "whole", "--format", "json")
    assert f'"seconds": {rows[0][-1].value}' in shown.out, shown.out


def test_a_clock_from_python_is_written_beside_its_run(tmp_path: Path) -> None:
    x, y = torch.randn(60, 4).numpy(), (torch.arange(60) % 3).numpy()
    data = fedstill.split(x, y, partition=fedstill.Iid(3))
    population = fedstill.Population(data, MLP((4,), 3, hidden=(8,)))
    clock = fedstill.Clock(speed=1e6)
    experiment = fedstill.Experiment(FedAvg(), population, rounds=1, clock=clock)
    found = fedstill.run(experiment, folder=tmp_path / "run")
    assert found.summary["simulated_seconds"] > 0
    assert '"speed": 1000000.0' in (tmp_path / "run" / "experiment.json").read_text()
