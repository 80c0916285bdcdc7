"""What a site answers, what it refuses, and what never leaves it."""

from __future__ import annotations

import random
import resource
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Never

import pytest
import torch

from fedstill.channels import TopK
from fedstill.channels.coded import Layer
from fedstill.core import files
from fedstill.core.errors import LONGEST, BadValue, SiteError, WireError, told
from fedstill.core.method import Method, Scored, at_clients, at_server
from fedstill.core.node import SERVER, Inbox, Node
from fedstill.core.records import Message, State, Weights
from fedstill.engines.execution import Execution
from fedstill.engines.play.in_process import InProcess
from fedstill.engines.ranks.letters import Letters, as_bytes, as_tensor, kinds_of, packed
from fedstill.engines.ranks.protocol import Letter
from fedstill.engines.spending import Purse
from fedstill.federation.budget import calibrated
from fedstill.federation.run import run
from fedstill.logbook.writer import MemoryLog
from fedstill.methods import METHODS
from fedstill.methods.fedavg import Down, Up
from fedstill.privacy.accounting import Releases, epsilon_of_releases
from fedstill.privacy.privacy import Privacy
from fedstill.sites import release_log, words
from fedstill.sites.exchange import Loopback
from fedstill.sites.site import Policy, Site
from fedstill.sites.words import Act, Acted, Examine, Hello, Over, Present, Refused
from fedstill.testing import at_sites, small, worlds
from fedstill.testing.at_sites import STANDING
from fedstill.wire import codec

MUTATIONS = 10_000


class Global(State):
    weights: Weights


class Counted(Message):
    """How many examples there are."""

    count: int


class Diary(State):
    """What a client tells nobody."""

    secret: torch.Tensor


@dataclass(frozen=True)
class Diarist(Method):
    """Clients remember something that they do not send."""

    def each_round(self) -> Any:
        return [self.tell, self.hear]

    def server_state(self, server: Node[Any]) -> Global:
        return Global(server.model.init(server.rng("weights", shared=True)))

    def client_state(self, client: Node[Any]) -> Diary:
        return Diary(client.noise("diary", 64))

    @at_clients
    def tell(self, client: Node[Diary], inbox: Inbox[Never]) -> Counted:
        """Write something down and say something else."""
        client.state = Diary(client.state.secret + client.noise("more", 64))
        return Counted(len(client.data))

    @at_server
    def hear(self, server: Node[Global], inbox: Inbox[Counted]) -> None:
        """Listen."""


class Overheard:
    """Keeps every byte that leaves a site."""

    def __init__(self, line: Any):
        self.line, self.requests, self.answers = line, [], []

    def ask(self, requests: Any, seconds: float) -> Any:
        answers = self.line.ask(requests, seconds)
        self.requests += requests.values()
        self.answers += answers.values()
        return answers


def overheard(
    method: Method, rounds: int = 2, world: worlds.World | None = None
) -> tuple[Overheard, dict[str, Site]]:
    world = world or worlds.pictures()
    there = at_sites.sites(method, world, rounds=rounds)
    line = Overheard(Loopback({name: site.answer for name, site in there.items()}))
    run(at_sites.away(method, world, there, lambda _: line, rounds=rounds), MemoryLog())
    return line, there


def refusal(site: Site, request: Any) -> str:
    answer = words.read(site.answer(words.written(request)))
    assert isinstance(answer, Refused)
    return answer.text


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return at_sites.sites(small(METHODS["scaffold"]), worlds.pictures(), tmp_path)["c0"]


def act(**changes: Any) -> Act:
    asked = Act("trial", "c0", 1, 0, "update", 0, "up", "never", "never", (), {}, ())
    return replace(asked, **changes)


def test_nothing_of_a_sites_memory_leaves_it() -> None:
    line, there = overheard(Diarist())
    for site in there.values():
        secret = site.engine.states[site.name]
        assert isinstance(secret, Diary)
        raw = secret.secret.numpy().tobytes()
        assert not any(raw in data or raw[:64] in data for data in line.answers)


@pytest.mark.parametrize("name", ["fedavg", "feddm", "fedproto", "desa"])
def test_no_test_image_leaves_a_site_and_only_weights_come_to_be_scored(name: str) -> None:
    line, there = overheard(small(METHODS[name]), 1)
    for site in there.values():
        test = site.engine.population.party(site.name).test
        for image in test.parts[0].pool.stored:
            assert not any(image.numpy().tobytes() in data for data in line.answers)
    examined = [words.read(data) for data in line.requests]
    model = worlds.pictures().server_model
    for request in examined:
        if isinstance(request, words.Examine) and request.server is not None:
            size = 4 * sum(model.floats().values())
            assert len(request.server) < size + 4096  # weights and the names of their tensors


def test_mutated_words_are_refused_and_never_raise() -> None:
    line, there = overheard(small(METHODS["fedavg"]), 1, worlds.vectors())
    rng, refused = random.Random(0), 0
    requests = [data for data in line.requests if isinstance(words.read(data), Act)]
    for number in range(MUTATIONS):
        data = bytearray(rng.choice(requests if number % 2 else line.answers))
        match number % 3:
            case 0:
                for _ in range(rng.randint(1, 4)):
                    data[rng.randrange(min(len(data), 600))] = rng.randrange(256)
            case 1:
                del data[rng.randrange(len(data)) :]
            case _:
                place = rng.randrange(len(data))
                data[place:place] = rng.randbytes(rng.randint(1, 9))
        try:
            words.read(bytes(data))
        except WireError:
            refused += 1
        if number % 50 == 1:  # the whole way through a site: an answer comes in any case
            assert isinstance(words.read(there["c0"].answer(bytes(data))), words.Record)
    assert refused > MUTATIONS * 2 // 3


def test_a_request_for_another_run_site_step_round_or_memory_is_refused(site: Site) -> None:
    assert "takes part in run trial, not in other" in refusal(site, act(run="other"))
    assert "this is c0, not c1" in refusal(site, act(node="c1"))
    assert "has no step aggregate for clients" in refusal(site, act(step="aggregate"))
    assert "asked for round 9, but the recipe has 4" in refusal(site, act(round=9))
    assert "no memory ../../et" in refusal(site, act(after="../../etc/passwd"))
    assert "no memory aaaaaaaa" in refusal(site, act(after="a" * 64))
    assert "to keep 67 memories" in refusal(site, act(keep=("a",) * 67))
    assert "letter 0 is named, but 0 came" in refusal(site, act(inbox={SERVER: 0}))
    assert "letter -1 is named" in refusal(site, act(inbox={SERVER: -1}))
    assert "Present is not asked of a site" in refusal(site, Present("c0", "", None, {}))


def test_a_coordinator_that_sends_nonsense_is_refused_too() -> None:
    method, world = small(METHODS["fedavg"]), worlds.vectors()
    there = at_sites.sites(method, world)["c0"]
    down = method.broadcast.sends  # what it would hear
    good = there.engine.node("c0", 1, "update").model.init(0)
    letters = Letters(there.kinds, there.held, codec.STRANGERS)
    for strange, why in (
        ({**good, "head.bias": good["head.bias"].double()}, "head.bias is float64 and not float32"),
        ({**good, "more": good["head.bias"]}, "more is not known"),
        ({name: tensor * 1e30 for name, tensor in good.items()}, "values beyond 1.1e+12"),
    ):
        places, enclosed = letters.enclosed({"c0": {"server": down(strange)}})
        text = refusal(there, act(inbox=places["c0"], letters=enclosed))
        assert text.startswith("server sent") and why in text, text


def test_what_comes_coded_or_is_of_another_kind_reaches_no_step(tmp_path: Path) -> None:
    """Such a message was judged by hints that allow everything, or by those of another step."""
    played: list[str] = []
    site = at_sites.sites(small(METHODS["fedavg"]), worlds.pictures(), tmp_path)["c0"]
    play: Any = site.engine.play

    def watched(step: Any, *more: Any) -> Any:
        played.append(step.name)
        return play(step, *more)

    site.engine.play = watched  # type: ignore[method-assign]
    asked = broadcast()
    layer = as_tensor(codec.encode(Layer({"weights.head.bias": {"values": torch.ones(9)}})))
    coded = asked.letters[0].replace(layers=(layer,))
    text = refusal(site, replace(asked, letters=(coded,)))
    assert text == "server sent Coded, but update reads Down"
    weights = codec.decode(as_bytes(asked.letters[0].data), Down).weights
    other = Letter(1, as_tensor(codec.encode(Up(weights, 1))), ())
    text = refusal(site, replace(asked, letters=(other,)))
    assert text == "server sent Up, but update reads Down"
    assert played == []
    assert isinstance(words.read(site.answer(words.written(asked))), Acted)


def test_a_hello_of_another_recipe_or_version_is_refused_with_both_values(site: Site) -> None:
    hello = replace(STANDING, node="c0")
    assert isinstance(words.read(site.answer(words.written(hello))), Present)
    for name, value in {"recipe": "another", "fedstill": "9.9", "wire": 7, "run": "x"}.items():
        text = refusal(site, replace(hello, **{name: value}))
        assert str(getattr(hello, name)) in text and str(value) in text


def test_a_hello_of_altered_code_is_refused_with_both_versions_and_what_to_do(site: Site) -> None:
    ours, theirs = "fedstill 0.1.0 (code aaaaaaaaaaaa)", "fedstill 0.1.0 (code bbbbbbbbbbbb)"
    site.standing = replace(site.standing, fedstill=f"{ours}, zoo-pack 1.0 (code cccccccccccc)")
    hello = replace(site.standing, fedstill=f"{theirs}, zoo-pack 1.0 (code cccccccccccc)")
    assert refusal(site, hello) == f"it has {ours}, the coordinator has {theirs}{words.SAME_CODE}"
    hello = replace(site.standing, fedstill=f"{ours}, zoo-pack 1.0 (code dddddddddddd)")
    text = refusal(site, hello)
    assert text.startswith("it has zoo-pack 1.0 (code cccccccccccc), the coordinator has zoo-pack")
    assert text.endswith(words.SAME_CODE)
    many = ", ".join(f"pack-{number} 1.0 (code aaaaaaaaaaaa)" for number in range(40))
    site.standing = replace(site.standing, fedstill=f"{many}, last 1.0 (code aaaaaaaaaaaa)")
    hello = replace(site.standing, fedstill=f"{many}, last 1.0 (code bbbbbbbbbbbb)")
    assert "last 1.0 (code bbbbbbbbbbbb)" in refusal(site, hello)  # beyond what a log shows


def test_a_step_that_fails_says_so_without_the_values_that_it_saw(tmp_path: Path) -> None:
    there = at_sites.sites(small(METHODS["scaffold"]), worlds.pictures(), tmp_path)
    text = refusal(there["c0"], act())  # nothing was broadcast, so the step cannot read it
    assert text == "Scaffold.update failed in round 1; see its own log"
    assert "Traceback" in (tmp_path / "c0" / "failures.log").read_text()
    assert "update" in (tmp_path / "c0" / "answers.csv").read_text()


def test_a_site_says_counts_only_if_its_policy_allows_it() -> None:
    world, method = worlds.pictures(), small(METHODS["fedavg"])
    engine = at_sites.engine_at(method, world, "c0")
    hello = replace(STANDING, node="c0")
    silent = Site(engine, hello)
    open_one = Site(engine, hello, policy=Policy(tell_counts=True), class_names=("a", "b", "c"))
    answers = [words.read(s.answer(words.written(hello))) for s in (silent, open_one)]
    silence, told = answers
    assert isinstance(silence, Present) and isinstance(told, Present)
    assert silence.examples is None and silence.counts == {}
    assert told.examples == 20 == sum(told.counts.values()) and "c" not in told.counts


def test_a_site_whose_labels_are_private_says_no_counts_whatever_its_policy(tmp_path: Path) -> None:
    hello = words.written(replace(STANDING, node="c0"))
    private = private_site(tmp_path / "a", labels="private", tell_counts=True).answer(hello)
    public = private_site(tmp_path / "b", tell_counts=True).answer(hello)
    silence, told = words.read(private), words.read(public)
    assert isinstance(silence, Present) and isinstance(told, Present)
    assert silence.examples is None and silence.counts == {}
    assert told.examples == 20


def test_a_method_that_shows_examples_needs_the_sites_consent() -> None:
    method = small(METHODS["centralised"])
    engine = at_sites.engine_at(method, worlds.pictures(), "c0")
    with pytest.raises(SiteError, match="shows training examples to others"):
        Site(engine, STANDING)
    Site(engine, STANDING, policy=Policy(allow_examples=True))


@pytest.mark.parametrize("name", ["feddm", "feddualmatch"])
def test_images_that_begin_as_examples_need_the_sites_consent(name: str) -> None:
    """A step or two at a tiny rate would send the examples themselves."""
    changed = {start: replace(small(METHODS[name]), start=start) for start in ("real", "noise")}
    engines = {s: at_sites.engine_at(m, worlds.pictures(), "c0") for s, m in changed.items()}
    with pytest.raises(SiteError, match=r'begin as training examples .*ask for start = "noise"'):
        Site(engines["real"], STANDING)
    Site(engines["real"], STANDING, policy=Policy(allow_examples=True))
    Site(engines["noise"], STANDING)


def test_a_coordinator_that_asks_too_often_is_refused_and_a_repeat_costs_nothing(
    tmp_path: Path,
) -> None:
    engine = at_sites.engine_at(Diarist(), worlds.pictures(), "c0")
    hello = replace(STANDING, node="c0")
    limited = Site(engine, hello, policy=Policy(most_acts=2), folder=tmp_path)
    asked = [words.written(act(step="tell", round=round)) for round in (1, 2, 3)]
    for data in (asked[0], asked[0], asked[1], asked[1]):
        assert isinstance(words.read(limited.answer(data)), Acted)
    again = Site(engine, hello, policy=Policy(most_acts=2), folder=tmp_path)
    answer = words.read(again.answer(asked[2]))  # what was asked before it was restarted counts
    assert isinstance(answer, Refused) and "more than 2 different acts" in answer.text


def test_a_coordinator_that_asks_for_scores_without_end_is_refused(tmp_path: Path) -> None:
    method, world = small(METHODS["fedavg"]), worlds.pictures()
    there = at_sites.sites(method, world, tmp_path, rounds=1)
    model = world.server_model
    asked = [
        words.Examine("trial", "c0", 1, "", packed(Scored(model.init(seed)))) for seed in range(5)
    ]
    for request in [*asked[:4], *asked[:4]]:
        assert isinstance(words.read(there["c0"].answer(words.written(request))), words.Examined)
    again = at_sites.sites(method, world, tmp_path, rounds=1)["c0"]  # what was asked before counts
    assert "more than 4 different scores" in refusal(again, asked[4])
    assert "scores of round 2, but the recipe has 1" in refusal(again, asked[0].replace(round=2))


def test_a_coordinator_that_asks_without_end_does_not_fill_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedstill.sites.site.MOST_LOG", 2000)
    engine = at_sites.engine_at(Diarist(), worlds.pictures(), "c0", rounds=1)
    site = Site(engine, replace(STANDING, node="c0"), folder=tmp_path, policy=Policy(most_acts=2))
    for number in range(100):
        site.answer(words.written(act(step="tell", channels="never", after=f"{number:064x}")))
        site.answer(words.written(Examine("trial", "c0", 1, f"{number:064x}", None)))
    assert isinstance(
        words.read(site.answer(words.written(act(step="tell", channels="never")))), Acted
    )
    # Acts that it has no memory for are refused, and not kept.
    assert len((tmp_path / "asked").read_text().splitlines()) == 1 + site.most_scores
    assert (tmp_path / "answers.csv").stat().st_size < 2500


def test_a_sender_who_takes_no_part_is_refused(site: Site) -> None:
    said = refusal(site, act(inbox={"nobody\n": 0}))
    assert said == "nobody  takes no part in this run"


def test_an_act_that_is_not_in_the_plan_is_refused(site: Site) -> None:
    assert "update is not act 2 of round 1" in refusal(site, act(number=2))
    assert "update is not act -1 of round 1" in refusal(site, act(number=-1))
    assert "update is not act 0 of round 0" in refusal(site, act(round=0))


@pytest.mark.parametrize("toward", [None, "down", "peer", "anything"])
def test_what_leaves_a_site_is_coded_by_the_recipes_channels_whatever_is_asked(
    toward: str | None,
) -> None:
    world, method = worlds.pictures(), METHODS["fedavg"](epochs=1, batch_size=8)
    site = at_sites.sites(method, world, channels=[TopK(share=0.1, directions=("up",))])["c0"]
    coded = site.answer(words.written(broadcast()))
    assert isinstance(words.read(coded), Acted)
    said = refusal(site, broadcast().replace(toward=toward))
    assert said.startswith(
        f"what update says travels up in the recipe's plan, not {toward or 'no'}"
    )


def private_site(
    folder: Path,
    key: bytes = b"k" * 32,
    epsilon: float = 4.0,
    labels: Literal["public", "private"] = "public",
    **policy: Any,
) -> Site:
    world, method = worlds.pictures(), METHODS["fedavg"](epochs=1, batch_size=8)
    privacy = Privacy(epsilon=epsilon, labels=labels)
    engine = worlds.engine_for(method, world, rounds=2)
    ready = calibrated(replace(engine.experiment, privacy=privacy), Execution(device="cpu"))
    own = at_sites.seen_from(world, "c0")
    experiment = replace(ready, population=own)
    hello = replace(STANDING, node="c0")
    made = InProcess(experiment, Execution(device="cpu"))
    return Site(made, hello, key=key, folder=folder, policy=Policy(**policy))


def broadcast(shift: float = 0.0) -> Act:
    world, method = worlds.pictures(), METHODS["fedavg"](epochs=1, batch_size=8)
    engine = worlds.engine_for(method, world, rounds=2)
    (first, *_) = method.each_round()
    message = engine.play(first, 1, {SERVER: Inbox()})[SERVER].message
    moved = message.replace(weights={n: w + shift for n, w in message.weights.items()})
    places, letters = Letters(kinds_of(method)).enclosed({"c0": {SERVER: moved}})
    return act(number=1, inbox=places["c0"], letters=letters)


def test_noise_is_made_with_the_sites_key_and_a_release_is_repeated_bit_for_bit(
    tmp_path: Path,
) -> None:
    asked = words.written(broadcast())
    one = private_site(tmp_path / "a").answer(asked)
    assert isinstance(words.read(one), Acted)
    (tmp_path / "a" / "last-answer").unlink()  # so that it is played again, from the beginning
    assert private_site(tmp_path / "a").answer(asked) == one
    other = private_site(tmp_path / "b", key=b"x" * 32).answer(asked)
    assert isinstance(words.read(other), Acted) and other != one


def test_under_privacy_an_act_is_released_once_whatever_is_asked(tmp_path: Path) -> None:
    site = private_site(tmp_path)
    first, changed = broadcast(), broadcast(0.1)
    assert isinstance(words.read(site.answer(words.written(first))), Acted)
    assert "under privacy an act is released once" in refusal(site, changed)
    again = private_site(tmp_path)  # also after it was started again
    assert "under privacy an act is released once" in refusal(again, changed)
    kept = words.written(first.replace(keep=("a" * 64,)))  # what is to be kept changes nothing
    assert isinstance(words.read(again.answer(kept)), Acted)


def test_a_site_spends_no_more_than_its_budget_whatever_memories_it_is_asked_to_start_from(
    tmp_path: Path,
) -> None:
    """A ledger that lay with a memory alone would be empty wherever that memory is not named."""
    heard, rows = [], []
    for round in (1, 2):
        for number in (0, 1):  # where the server is not heard a step comes sooner
            site = private_site(tmp_path)  # also if it was started again
            asked = broadcast().replace(round=round, number=number)
            answer = words.read(site.answer(words.written(asked)))
            if isinstance(answer, Acted):
                heard.append(answer)
                rows += [Releases(row.sigma, row.rate, row.releases) for row in answer.left.spent]
    assert len(heard) == 2  # as often as the recipe plans
    assert epsilon_of_releases(rows, 1e-5) <= 4
    one, other = (torch.cat([letter.data for letter in each.letters]) for each in heard)
    assert not torch.equal(one, other)  # the same question, and other noise


def test_an_act_that_was_refused_before_it_was_played_may_be_asked_for_rightly(
    tmp_path: Path,
) -> None:
    site = private_site(tmp_path)
    assert "it has no memory" in refusal(site, broadcast().replace(after="a" * 64))
    assert isinstance(words.read(site.answer(words.written(broadcast()))), Acted)
    # Now it has been played, and is not for anything else.
    assert "for another inbox or memory" in refusal(site, broadcast(0.1))


def test_a_step_that_fails_when_its_use_was_granted_releases_and_spends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grant = Purse.grant

    def granted(*given: Any) -> Any:
        grant(*given)
        raise RuntimeError("no memory left")

    site = private_site(tmp_path / "a")
    with monkeypatch.context() as failing:
        failing.setattr(Purse, "grant", granted)
        assert "failed in round 1; see its own log" in refusal(site, broadcast())
    assert not (tmp_path / "a" / "spent.json").exists()
    # It may come again for the same alone, and is what it would have been.
    assert "an act is released once" in refusal(site, broadcast(0.1))
    asked = words.written(broadcast())
    answer = site.answer(asked)
    assert isinstance(words.read(answer), Acted)
    assert answer == private_site(tmp_path / "b").answer(asked)
    assert (tmp_path / "a" / "spent.json").read_text() == (
        tmp_path / "b" / "spent.json"
    ).read_text()


def test_one_step_is_released_once_though_the_power_failed_and_its_ledger_is_lost(
    tmp_path: Path,
) -> None:
    """What was asked is appended to a file; the others are written anew and renamed."""
    private_site(tmp_path).answer(words.written(broadcast()))
    for name in ("spent.json", "released.json", "last-answer"):
        (tmp_path / name).unlink()
    for number in (0, 1):  # its noise follows from the round and the step, whatever the number
        asked = broadcast(0.1).replace(number=number)
        assert "an act is released once" in refusal(private_site(tmp_path), asked)


def test_the_names_of_files_are_on_the_disk_too_before_an_answer_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site, synced = private_site(tmp_path), []
    monkeypatch.setattr(files, "sync_folder", lambda folder: synced.append(Path(folder)))
    monkeypatch.setattr(release_log, "sync_folder", files.sync_folder)
    assert isinstance(words.read(site.answer(words.written(broadcast()))), Acted)
    assert synced.count(tmp_path) >= 4  # what was asked, what it spent and came to, the answer
    assert tmp_path / "memories" in synced  # from which the next act goes on


def test_an_act_that_comes_again_after_others_is_the_very_same_release(tmp_path: Path) -> None:
    first, second = broadcast(), broadcast().replace(round=2)
    said = [private_site(tmp_path).answer(words.written(act)) for act in (first, second)]
    assert private_site(tmp_path).answer(words.written(first)) == said[0]
    assert private_site(tmp_path).answer(words.written(second)) == said[1]


def test_an_act_that_is_rounded_otherwise_when_it_comes_again_is_not_released(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on another device: the same noise over sums that differ a little."""
    first, second = broadcast(), broadcast().replace(round=2)
    for each in (first, second):
        private_site(tmp_path).answer(words.written(each))
    site = private_site(tmp_path)
    plain = site.engine.play

    def rounded(*given: Any) -> Any:
        (outcome,) = plain(*given).values()
        weights = {name: w * (1 + 1e-6) for name, w in outcome.message.weights.items()}
        return {"c0": replace(outcome, message=outcome.message.replace(weights=weights))}

    monkeypatch.setattr(site.engine, "play", rounded)
    assert "comes to another answer now" in refusal(site, first)


def test_a_site_takes_no_part_in_runs_whose_delta_is_larger_than_it_allows(tmp_path: Path) -> None:
    with pytest.raises(SiteError, match=r"spends delta = 1e-05 .* this site allows 1e-06"):
        private_site(tmp_path, most_epsilon=4, most_delta=1e-6)
    private_site(tmp_path, most_epsilon=4, most_delta=1e-5)
    engine = at_sites.engine_at(small(METHODS["fedavg"]), worlds.pictures(), "c0")
    with pytest.raises(SiteError, match=r"most_delta = 1e-06\), and the recipe promises none"):
        Site(engine, replace(STANDING, node="c0"), policy=Policy(most_delta=1e-6))


def test_a_site_takes_no_part_in_runs_that_promise_less_than_it_asks_for(tmp_path: Path) -> None:
    private_site(tmp_path / "a", epsilon=4, most_epsilon=4)
    with pytest.raises(SiteError, match=r"spends epsilon = 4 .* allows 2"):
        private_site(tmp_path / "b", epsilon=4, most_epsilon=2)
    engine = at_sites.engine_at(small(METHODS["fedavg"]), worlds.pictures(), "c0")
    with pytest.raises(SiteError, match=r"the recipe promises none"):
        Site(engine, STANDING, policy=Policy(most_epsilon=1))


def test_the_last_answer_is_given_again_after_a_restart(tmp_path: Path) -> None:
    engine = at_sites.engine_at(Diarist(), worlds.pictures(), "c0")
    hello, data = replace(STANDING, node="c0"), words.written(act(step="tell"))
    first = Site(engine, hello, folder=tmp_path).answer(data)
    second = Site(engine, hello, folder=tmp_path)
    engine.states.clear()
    assert second.answer(data) == first
    assert "c0" not in engine.states  # nothing was played again


def test_a_full_disk_is_a_refusal_that_says_so(tmp_path: Path) -> None:
    engine = at_sites.engine_at(Diarist(), worlds.pictures(), "c0")
    full = Site(engine, replace(STANDING, node="c0"), folder=tmp_path)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (200, before[1]))  # a memory has 256 bytes
        said = refusal(full, act(step="tell"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "cannot write to its folder: File too large" in said
    answer = words.read(full.answer(words.written(act(step="tell"))))
    assert isinstance(answer, Acted)  # with room again it goes on from where it was


@pytest.mark.parametrize("left", [10, 70])  # of a line "digest round number"
def test_a_line_that_a_full_disk_cut_off_spoils_no_other(left: int, tmp_path: Path) -> None:
    first = broadcast()
    asked = tmp_path / "asked"
    full = private_site(tmp_path)
    asked.write_bytes(b"x" * 66 + b"\n")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (67 + min(left, 67), before[1]))
        assert "cannot write to its folder" in refusal(full, first)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert isinstance(words.read(full.answer(words.written(first))), Acted)
    again = private_site(tmp_path)  # what was asked is known after a new start, and only that
    assert "under privacy an act is released once" in refusal(again, broadcast(0.1))
    assert isinstance(words.read(again.answer(words.written(first))), Acted)
    (tmp_path / "last-answer").unlink()
    assert isinstance(words.read(private_site(tmp_path).answer(words.written(first))), Acted)


def test_an_act_whose_line_was_cut_off_is_still_released_once(tmp_path: Path) -> None:
    """The site was started again since, and another line made the one that was cut off whole."""
    digest = release_log.digest_of(words.written(broadcast()))
    private_site(tmp_path)
    (tmp_path / "asked").write_text(f"{digest} 1 upd\n{'0' * 64} 2 update 0\n")
    assert isinstance(words.read(private_site(tmp_path).answer(words.written(broadcast()))), Acted)
    assert "an act is released once" in refusal(private_site(tmp_path), broadcast(0.1))


def test_a_site_knows_when_the_run_is_over(site: Site) -> None:
    assert not site.over
    assert isinstance(words.read(site.answer(words.written(Over("trial", "c0")))), words.Done)
    assert site.over


def test_what_others_say_is_one_short_line_in_a_log() -> None:
    assert told("a\nb\x1b[31mc") == "a b [31mc"
    assert len(told("x" * 5000)) == LONGEST + 1


def test_a_policy_out_of_range_is_refused() -> None:
    with pytest.raises(BadValue, match="policy: most_acts"):
        Policy(most_acts=0)


def test_an_answer_of_another_round_is_no_answer() -> None:
    asked = act()
    left = words.Left(None, False, {}, (), {}, None, False, True, False, False)
    old = Acted("trial", "c0", 0, 0, "update", left, (), "never", "never")
    with pytest.raises(SiteError, match="answered for round 0, but was asked for 1"):
        words.answered(Acted, asked, old)
    with pytest.raises(SiteError, match="answered Hello, not Acted"):
        words.answered(Acted, asked, Hello("", "", "", "", 1, ""))
