"""A run over several ranks gives what a run in one process gives, bit for bit."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Never

import pytest
import torch

import worlds
from engines import rank_jobs
from engines.fake_line import spread
from engines.rank_jobs import ended, job, start
from fedstill.channels import EightBit, TopK
from fedstill.core.errors import RankError
from fedstill.core.method import Method, at_clients
from fedstill.core.node import Addressed, Inbox, Node
from fedstill.core.records import Direction, Message, NodeId, State
from fedstill.core.release import Use
from fedstill.engines.execution import Execution
from fedstill.engines.play.batched import Batched
from fedstill.engines.play.in_process import InProcess
from fedstill.engines.ranks import letters
from fedstill.engines.ranks import protocol as talk
from fedstill.engines.ranks.follower import Follower
from fedstill.engines.ranks.leader import Leader, owners
from fedstill.engines.ranks.threads import transports
from fedstill.federation.run import run
from fedstill.federation.sampling import Sample
from fedstill.logbook.writer import MemoryLog
from fedstill.methods import METHODS
from fedstill.privacy.privacy import Privacy
from fedstill.recipe.tables import values
from fedstill.recipe.toml import toml_text
from fedstill.testing import small
from small_recipes import CLIENTS, CONVNET, contents, fedstill, last_weights, metrics, tables

# ---- ranks that are threads: every method


def rows(log: MemoryLog) -> tuple[list[Any], ...]:
    """All that is written down, but for the times."""
    metrics = [n for n in log.metrics if n.name != "seconds"]
    return metrics, log.messages, log.notes, log.privacy


def tensors(engine: Any) -> dict[str, dict[str, torch.Tensor] | None]:
    return {n: s if s is None else s.tensors() for n, s in engine.states.items()}


def assert_equal(one: Any, other: Any, tolerance: float = 0.0) -> None:
    assert one.keys() == other.keys()
    for node, named in one.items():
        if named is None:
            assert other[node] is None
            continue
        assert named.keys() == other[node].keys()
        for name, tensor in named.items():
            near = torch.allclose(tensor, other[node][name], atol=tolerance, rtol=tolerance)
            assert near if tolerance else torch.equal(tensor, other[node][name]), f"{node} {name}"


@contextmanager
def played(
    method: Any, world: Any, ranks: int = 2, kind: Any = InProcess, **options: Any
) -> Iterator[tuple[Leader, MemoryLog]]:
    """The engine and the logbook after two rounds over some ranks."""
    engines = [worlds.engine_for(method, world, kind, 2, **options) for _ in range(ranks)]
    with spread(engines) as engine:
        log = MemoryLog()
        run(engine, log)
        yield engine, log


@pytest.mark.parametrize("name", METHODS)
def test_every_method_over_two_ranks_equals_itself_on_one(name: str) -> None:
    method, world, sampler = small(METHODS[name]), worlds.pictures(), Sample(count=2)
    alone, log = worlds.played(method, world, 2, sampling=sampler)
    with played(method, world, sampling=sampler) as (both, other):
        assert rows(other) == rows(log)
        assert_equal(tensors(alone), tensors(both))


@pytest.mark.parametrize("name", ["fedavg", "scaffold", "feddm", "desa", "heterofl"])
def test_what_channels_do_and_remember_is_the_same_over_ranks(name: str) -> None:
    method, world = small(METHODS[name]), worlds.pictures()
    ways: tuple[Direction, ...] = ("up", "down", "peer")
    row = [
        TopK(directions=ways, share=0.3, least=1), EightBit(directions=ways, stochastic=True)
    ]  # fmt: skip
    options = {"channels": row, "sampling": Sample(count=2)}
    alone, log = worlds.played(method, world, 2, **options)
    with played(method, world, memory_limit=0, **options) as (both, other):
        assert rows(other) == rows(log)
        assert_equal(tensors(alone), tensors(both))
    remembers = name in ("fedavg", "scaffold", "heterofl")  # they send weights that they heard
    assert any("channels" in node for node in alone.states) == remembers


def test_stacks_over_ranks_differ_by_rounding_alone() -> None:
    method, world = small(METHODS["scaffold"]), worlds.vectors()
    alone, _ = worlds.played(method, world, 2)
    with played(method, world, kind=Batched) as (both, _):
        assert_equal(tensors(alone), tensors(both), 1e-5)


def test_more_ranks_than_clients_and_memories_that_lie_on_disk_change_nothing() -> None:
    method, world = small(METHODS["scaffold"]), worlds.vectors()
    alone, log = worlds.played(method, world, 2)
    with played(method, world, 6, memory_limit=0) as (many, other):
        assert rows(other) == rows(log)
        assert_equal(tensors(alone), tensors(many))


def test_clients_are_dealt_evenly_for_the_whole_run_and_not_by_their_place() -> None:
    names = [f"c{i}" for i in range(100)]
    dealt = owners(names, 4)
    assert dealt == owners(names[::-1], 4)
    assert [list(dealt.values()).count(rank) for rank in range(4)] == [25] * 4
    assert {dealt[name] for name in names[::4]} == {0, 1, 2, 3}


class Own(State):
    """How often a client has acted."""

    acts: int


class Word(Message):
    """What is said."""

    text: torch.Tensor


@dataclass(frozen=True)
class Chat(Method):
    """Says one thing to all others but one, and another thing to that one."""

    def client_state(self, client: Node[Any]) -> Own:
        return Own(0)

    def each_round(self) -> list[Any]:
        return [self.speak, self.listen]

    @at_clients
    def speak(self, client: Node[Own], inbox: Inbox[Never]) -> Addressed[Word]:
        """Address everybody."""
        client.state = Own(client.state.acts + 1)
        client.log(plain=1, undefined=float("nan"), endless=float("inf"))
        client.spend(Use("class sums", 2))
        common, special = Word(torch.tensor(1.0)), Word(torch.tensor(2.0))
        return Addressed({c: special if c == "c0" else common for c in client.models})

    @at_clients
    def listen(self, client: Node[Own], inbox: Inbox[Word]) -> None:
        """Refuse what somebody says."""
        if client.id == "c3":
            client.reject("c1", "mumbled")
        client.log(heard=sum(float(word.text) for word in inbox.values()))

    def predict(self, node: Node[Any], x: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(x), worlds.CLASSES)


def test_addressed_words_odd_numbers_absences_and_refusals_arrive_as_they_were() -> None:
    def gone(_: Method, step: str, round: int, node: NodeId) -> str | None:
        return "no answer" if node == "c2" and round == 2 else None

    world, options = worlds.vectors(), {"absences": gone, "bad_messages": "leave_out"}
    options["privacy"] = Privacy(1.0, 1e-3)
    alone, log = worlds.played(Chat(), world, 2, **options)
    with played(Chat(), world, 3, **options) as (three, other):
        assert repr(rows(other)) == repr(rows(log))  # NaN is not equal to itself
        assert {node: s.acts for node, s in three.states.items() if isinstance(s, Own)} == {
            node: s.acts for node, s in alone.states.items() if isinstance(s, Own)
        }
    kinds = {note.kind for note in other.notes}
    assert kinds == {"absent", "left out"}
    assert len(other.privacy) == 7  # four clients in two rounds, of whom one was away once


def test_a_private_run_stopped_over_ranks_goes_on_with_what_everybody_has_spent(
    tmp_path: Path,
) -> None:
    pytest.importorskip("dp_accounting")
    method, world = small(METHODS["fedavg"]), worlds.vectors()
    options: dict[str, Any] = {"rounds": 3, "privacy": Privacy(8.0, 1e-3)}
    alone, log = worlds.played(method, world, **options)
    with spread([worlds.engine_for(method, world, **options) for _ in range(2)]) as engine:
        run(
            engine, MemoryLog(), save=lambda round: engine.save(tmp_path, round, digest="d", keep=9)
        )
        assert_equal(tensors(alone), tensors(engine))
    for path in tmp_path.glob("round-0000[23]"):
        shutil.rmtree(path)
    with spread([worlds.engine_for(method, world, **options) for _ in range(2)]) as engine:
        engine.load(tmp_path, digest="d")
        run(engine, other := MemoryLog(), done=1)
        assert_equal(tensors(alone), tensors(engine))
    assert other.privacy == [row for row in log.privacy if row.round > 1]


def test_memories_are_fetched_kept_and_forgotten_wherever_they_lie() -> None:
    method, world = small(METHODS["scaffold"]), worlds.vectors()
    with played(method, world) as (engine, _):
        saved = tensors(engine)
        far = [node for node in world.clients if engine.states.rank_of(node) == 1]
        assert far and not engine.states.is_blank(far[0])
        states = dict(engine.states)
        engine.states.clear()
        assert len(engine.states) == 0
        engine.restore(states)
        assert_equal(saved, tensors(engine))
        engine.states.changed.clear()
        engine.states[far[0]] = None
        assert engine.states[far[0]] is None and engine.states.changed == {far[0]}


def test_a_message_for_many_crosses_to_a_rank_once() -> None:
    method = small(METHODS["fedavg"])
    sent = {}
    for clients in (4, 16):
        with played(method, worlds.vectors([8] * clients)) as (engine, _):
            sent[clients] = engine.transport.sent
    assert sent[16] < 1.8 * sent[4]


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_failure_is_raised_when_all_have_answered(ranks: int) -> None:
    method, world = small(METHODS["local"]), worlds.vectors()
    broken = owners(world.clients, ranks)

    class Fails(InProcess):
        def _run(self, loop: Any, node: Any) -> Any:
            if node.round == 1 and broken[node.id] == ranks - 1:
                raise ValueError("no more")
            return super()._run(loop, node)

    engines = [worlds.engine_for(method, world, Fails, 2) for _ in range(ranks)]
    with spread(engines) as engine:
        with pytest.raises(RankError, match=rf"rank {ranks - 1}: Local.learn failed on .*no more"):
            run(engine, MemoryLog())
        run(engine, MemoryLog(), done=1)  # nobody is left with an old answer


def test_a_question_at_the_wrong_time_and_a_bug_are_answered_too() -> None:
    method, world = small(METHODS["local"]), worlds.vectors()
    with spread([worlds.engine_for(method, world), worlds.engine_for(method, world)]) as engine:
        with pytest.raises(RankError, match="rank 1: it was asked for Done at the wrong time"):
            talk.ask_one(engine.transport, 1, talk.Done())
        with pytest.raises(RankError, match=r"(?s)rank 1: Traceback.*KeyError: 'nobody'"):
            talk.ask_one(engine.transport, 1, talk.Recall("nobody"))


def test_a_rank_that_built_nothing_says_why_until_it_is_over() -> None:
    leader, other = transports(2)
    talk.say(leader, 1, talk.Ready("", ""))
    talk.say(leader, 1, talk.Over())
    talk.excuse(other, RankError("no such file"))
    answer = talk.hear(leader, 1)
    assert isinstance(answer, talk.Failed) and answer.text == "no such file"


# ---- ranks that are processes: the command

NAMES = ("fedavg", "scaffold", "desa", "feddm", "fedlgd", "fedrolex", "dfrd")


def write(folder: Path, *names: str, rounds: int = 2, **data: Any) -> Path:
    """A recipe with some methods, small."""
    made = tables(folder)
    made["models"] = CONVNET
    cache = str(folder / "cache")
    made["run"] |= {"rounds": rounds, "threads": 1, "cache_dir": cache}
    made["data"] |= data
    methods = [{"name": name, **values(small(METHODS[name]))} for name in names]
    made["method"] = methods if len(methods) > 1 else methods[0]
    path = folder / "recipe.toml"
    path.write_text(toml_text(made))
    return path


def assert_same_run(one: Path, other: Path) -> None:
    assert last_weights(one) == last_weights(other) != {}
    assert metrics(one) == metrics(other)
    assert (one / "messages.csv").read_bytes() == (other / "messages.csv").read_bytes()
    assert (one / "recipe.toml").read_bytes() == (other / "recipe.toml").read_bytes()
    assert sorted(contents(one)) == sorted(contents(other))


def test_the_command_over_two_ranks_equals_the_command_alone(tmp_path: Path) -> None:
    recipe = write(tmp_path, *NAMES)
    done = job(tmp_path, 2, "run", recipe, "--out", tmp_path / "two")
    assert done.codes == [0, 0], done.screen
    shutil.rmtree(tmp_path / "cache")
    alone = fedstill("run", recipe, "--out", tmp_path / "one")
    # Gloo of torch 2.9 says on the screen who is connected.
    said = [line for line in done.screen.splitlines(True) if not line.startswith("[Gloo]")]
    assert "".join(said).replace("/two/", "/one/") == alone.out
    for name in NAMES:
        assert_same_run(tmp_path / "one" / name, tmp_path / "two" / name)
    notes = (tmp_path / "two" / "fedavg" / "notes.csv").read_text()
    assert "in_process, chosen for device cpu and these networks, over 2 ranks" in notes


def test_virtual_data_are_made_where_the_clients_are(tmp_path: Path) -> None:
    virtual = {"per_class": 2, "warm_up_steps": 3}
    recipe = write(tmp_path, "fedavg", virtual=virtual)
    done = job(tmp_path, 2, "run", recipe, "run.pictures=true", "--out", tmp_path / "two")
    assert done.codes == [0, 0], done.screen
    assert len(list((tmp_path / "cache").iterdir())) == len(CLIENTS)
    shutil.rmtree(tmp_path / "cache")
    fedstill("run", recipe, "run.pictures=true", "--out", tmp_path / "one")
    assert_same_run(tmp_path / "one", tmp_path / "two")


def test_a_job_killed_over_two_ranks_goes_on_alone(tmp_path: Path) -> None:
    recipe = write(tmp_path, "scaffold", rounds=12)
    processes = start(tmp_path, 2, "run", recipe, "--out", tmp_path / "killed")
    while not list((tmp_path / "killed" / "checkpoints").glob("round-0000[2-9]")):
        time.sleep(0.002)
    for process in processes:
        os.kill(process.pid, signal.SIGKILL)
    ended(tmp_path, processes)
    assert not (tmp_path / "killed" / "summary.json").exists()
    assert fedstill("resume", tmp_path / "killed").code == 0
    fedstill("run", recipe, "--out", tmp_path / "whole")
    assert_same_run(tmp_path / "whole", tmp_path / "killed")


def test_a_run_begun_alone_goes_on_over_three_ranks(tmp_path: Path) -> None:
    recipe = write(tmp_path, "scaffold", rounds=4)
    fedstill("run", recipe, "run.rounds=2", "--out", tmp_path / "part")
    limit = "engine.memory_limit=0"
    done = job(tmp_path, 3, "resume", tmp_path / "part", "run.rounds=4", limit)
    assert done.codes == [0, 0, 0], done.screen
    fedstill("run", recipe, limit, "--out", tmp_path / "whole")
    assert_same_run(tmp_path / "whole", tmp_path / "part")


def test_a_step_that_fails_on_one_rank_ends_all_with_one_message(tmp_path: Path) -> None:
    recipe = write(tmp_path, "fedavg")
    folder = tmp_path / "run"
    done = job(tmp_path, 2, "run", recipe, "--out", folder, wreck=rank_jobs.step_fails)
    assert done.codes == [2, 2]
    assert done.screen.count("no more") == 1
    assert "rank 1: FedAvg.update failed on east in round 2: ValueError: no more" in done.screen
    assert fedstill("resume", folder).code == 0  # from the checkpoint of the round before


def test_runs_of_a_grid_that_fail_over_two_ranks_do_not_keep_the_others_from_running(
    tmp_path: Path,
) -> None:
    """One fails in a round, and one before the first, where clients distil their data."""
    recipe = write(tmp_path, "fedavg", virtual={"per_class": 2, "warm_up_steps": 3})
    (tmp_path / "file").touch()
    caches = ",".join(f'"{tmp_path / name}"' for name in ("cache", "file/below", "other"))
    done = job(
        tmp_path, 2, "run", recipe, "--out", tmp_path / "run",
        "--sweep", f"run.cache_dir={caches}", "--sweep", "method.lr=1e30,0.1",
    )  # fmt: skip
    assert done.codes == [2, 2], done.screen
    assert "4 of 6 runs failed" in done.screen
    summaries = (tmp_path / "run").rglob("summary.json")
    recipes = [tomllib.loads((path.parent / "recipe.toml").read_text()) for path in summaries]
    assert {(made["run"]["cache_dir"], made["method"]["lr"]) for made in recipes} == {
        (str(tmp_path / name), 0.1) for name in ("cache", "other")
    }


def test_methods_that_do_not_fit_are_refused_together_over_two_ranks(tmp_path: Path) -> None:
    recipe = write(tmp_path, "fedavg", "heterofl", "feddropout")
    own = tmp_path / "mine.py"
    own.write_text("from torch import nn\ndef net():\n"
                   "    return nn.Sequential(nn.Flatten(), nn.Linear(64, 3))\n")  # fmt: skip
    made = tomllib.loads(recipe.read_text()) | {"models": {"name": f"{own}:net"}}
    recipe.write_text(toml_text(made))
    done = job(tmp_path, 2, "run", recipe, "--out", tmp_path / "run")
    assert done.codes == [2, 2] and "2 faults" in done.screen, done.screen
    assert not (tmp_path / "run").exists()


def test_a_rank_that_dies_ends_the_job(tmp_path: Path) -> None:
    done = job(
        tmp_path, 2, "run", write(tmp_path, "fedavg"), "--out", tmp_path / "run",
        wreck=rank_jobs.dies,
    )  # fmt: skip
    assert done.codes == [2, 9]
    assert "rank 1 has ended without a word" in done.screen


@pytest.mark.parametrize(
    ("words", "wreck", "said"),
    [
        (["method.lr=-1"], None, "method.lr"),
        (["data.name=nothing"], None, "unknown data set"),
        (["models.width=0"], None, "width"),
        ([], rank_jobs.has_other_data, "rank 1: its data are not those of rank 0"),
    ],
)
def test_what_is_refused_is_said_once_and_nothing_is_written(
    tmp_path: Path, words: list[str], wreck: Any, said: str
) -> None:
    recipe = write(tmp_path, "fedavg")
    done = job(tmp_path, 2, "run", recipe, *words, "--out", tmp_path / "run", wreck=wreck)
    assert done.codes == [2, 2]
    assert done.screen.count(said) == 1, done.screen
    assert not (tmp_path / "run").exists()


def test_a_rank_without_an_address_of_the_others_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    said = fedstill("run", write(tmp_path, "fedavg"), "--out", tmp_path / "run")
    assert said.code == 2
    assert "start it with torchrun, or unset RANK and WORLD_SIZE to run alone" in said.err


def test_the_ranks_of_a_machine_sit_at_its_gpus_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)

    def at(name: str, local_rank: int) -> str:
        return str(Execution(device=name).at(local_rank).torch_device)

    assert [at("auto", local_rank) for local_rank in range(3)] == ["cuda:0", "cuda:1", "cuda:0"]
    assert at("cuda", 1) == "cuda:1"
    assert at("cuda:0", 1) == "cuda:0"  # as was asked for
    assert str(Execution(device="cuda").torch_device) == "cuda"
    assert at("cpu", 1) == "cpu"


def test_memories_lie_in_the_run_folder_where_a_rank_sees_it(tmp_path: Path) -> None:
    engine = worlds.engine_for(small(METHODS["local"]), worlds.vectors())
    for run_folder, seen in ((tmp_path / "elsewhere", None), (tmp_path, tmp_path)):
        lies_in = run_folder / "asleep" / "rank-1"
        assert isinstance(Follower(engine).answer(talk.SpillTo(str(lies_in))), talk.Done)
        assert engine.states.folder == (seen and lies_in)


class Twice(Chat):
    """Two steps of one name that are not the same."""

    def before(self) -> list[Any]:
        return [replace(self.speak, act=_silent)]


def _silent(method: Any, client: Node[Own], inbox: Inbox[Never]) -> None:
    """Say nothing."""


def test_two_different_steps_of_one_name_are_refused() -> None:
    with pytest.raises(RankError, match="Twice has two different steps speak"):
        Follower(worlds.engine_for(Twice(), worlds.vectors()))


def test_a_message_of_a_kind_that_no_hint_names_is_refused() -> None:
    class Longer(Word):
        """More than was said."""

    with pytest.raises(RankError, match="Longer is sent, but no step of the method has it"):
        letters.Letters([Word]).enclosed({"c0": {"": Longer(torch.zeros(1))}})


def test_a_message_is_not_taken_for_an_earlier_one_that_lay_at_its_place() -> None:
    post = letters.Letters([Word])
    for number in range(20):  # each is gone when the next is made, and lends it its id
        _, enclosed = post.enclosed({"c0": {"": Word(torch.full((1,), float(number)))}})
        (message,) = post.opened(enclosed, torch.device("cpu"))
        assert message.text.item() == number


def test_torchrun_starts_it(tmp_path: Path) -> None:
    recipe = write(tmp_path, "fedavg", rounds=1)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["-m", "fedstill", "run", str(recipe), "--out", str(tmp_path / "two")]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("fedavg") == 1
    fedstill("run", recipe, "--out", tmp_path / "one")
    assert_same_run(tmp_path / "one", tmp_path / "two")


class Told(Message):
    """One number."""

    value: torch.Tensor


def test_a_letter_is_never_that_of_an_earlier_message_whose_place_in_memory_it_took() -> None:
    written = letters.Letters([Told])
    for number in range(50):
        _, (letter,) = written.enclosed({"a": {"": Told(torch.tensor([float(number)]))}})
        (message,) = written.opened((letter,), torch.device("cpu"))
        assert isinstance(message, Told) and message.value.tolist() == [number]
