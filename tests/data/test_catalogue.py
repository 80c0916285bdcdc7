"""One table of names and one door."""

import ast
from pathlib import Path

import numpy as np
import pytest

import fedstill.data
from data.made_up import grey_file, image_set
from fedstill.core.errors import DataError
from fedstill.data import DATASETS, Entry, clients, entry_of, load
from fedstill.data.partitions import ClassesPerClient, Iid
from fedstill.data.sites import held_out


def test_an_unknown_name_gets_the_nearest_and_the_list():
    with pytest.raises(DataError, match=r"'digit5'; did you mean 'digits5'\? known: DIGITS, OFF"):
        load("digit5")
    with pytest.raises(DataError, match=r"did you mean 'torchvision:CIFAR100'"):
        load("torchvision:CIFAR-100")


def test_an_unknown_option_is_named(tmp_path):
    with pytest.raises(DataError, match=r"unknown option of mnist 'percent'"):
        load("mnist", data_dir=tmp_path, percent=10)


def test_every_entry_says_what_it_is():
    kinds = {entry.kind for entry in DATASETS.values()}
    assert kinds == {"embedded", "file", "composed", "public", "own"}
    for entry in DATASETS.values():
        assert entry.description
        assert "\n" not in entry.description
        assert bool(entry.files) == (entry.kind in ("file", "composed"))


def test_a_single_set_without_a_partition_is_one_client(tmp_path):
    grey_file(tmp_path / "mnist.npz")
    made = load("mnist", data_dir=tmp_path)
    assert [(site.name, len(site)) for site in made.sites] == [("all", 30)]


def test_the_seed_decides_the_split_and_nothing_else(tmp_path):
    grey_file(tmp_path / "mnist.npz")
    wish = ClassesPerClient(clients=5, classes=2)
    first, again, other = (
        load("mnist", data_dir=tmp_path, partition=wish, seed=seed) for seed in (0, 0, 1)
    )
    assert first.digest() == again.digest() != other.digest()
    assert first.sites[0].pool.digest() == other.sites[0].pool.digest()


def test_the_package_itself_imports_only_numpy_and_the_standard_library():
    allowed = {"numpy", "fedstill", "__future__"}
    from sys import stdlib_module_names

    for path in Path(fedstill.data.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
            for name in names:
                root = name.partition(".")[0]
                assert root in allowed | stdlib_module_names, f"{path.name} imports {name}"


def test_held_out_examples_take_the_place_of_the_test_set():
    whole = load("digits5")
    held = load("digits5", hold_out=0.2)
    for before, after in zip(whole.sites, held.sites, strict=True):
        assert len(after) + len(after.test) == len(before)
        assert len(after.test) == round(0.2 * len(before))
        kept = {image.tobytes() for image in after.pool.inputs[after.rows]}
        assert not kept & {image.tobytes() for image in after.test.inputs}
    assert "held out, not on the test set" in held.notes[-1]


def test_clients_of_a_partition_share_what_they_hold_out():
    split = {"kind": "dirichlet", "clients": 4, "alpha": 0.5}
    held = load("digits5", partition=split, hold_out=0.1, seed=3)
    assert all(site.test is held.sites[0].test for site in held.sites)
    assert sum(map(len, held.sites)) + len(held.sites[0].test) == 1500
    assert load("digits5", partition=split, hold_out=0.1, seed=3).digest() == held.digest()


def test_what_clients_share_is_held_out_in_the_order_of_the_set_not_client_by_client():
    split = {"kind": "dirichlet", "clients": 5, "alpha": 0.05}
    held = load("digits5", partition=split, hold_out=0.3)
    pool, aside = held.sites[0].pool, held.sites[0].test
    used = np.sort(np.concatenate([site.rows for site in held.sites]))
    rest = np.setdiff1d(np.arange(len(pool)), used)
    assert np.array_equal(aside.labels, pool.labels[rest])
    assert np.array_equal(aside.inputs, pool.inputs[rest])


def test_one_mean_and_std_stand_for_all_channels_and_all_clients():
    plain = load("digits5", normalise=((0.0,), (1.0,)))
    assert {(site.mean, site.std) for site in plain.sites} == {((0.0,) * 3, (1.0,) * 3)}
    grey = load("digits5", normalise=((0.1, 0.2, 0.3), (0.5,)), hold_out=0.2)
    assert {(site.mean, site.std) for site in grey.sites} == {((0.1, 0.2, 0.3), (0.5,) * 3)}


def test_a_mean_for_two_of_three_channels_is_refused():
    with pytest.raises(DataError, match="one value for each of 3 channels, but have 2 and 3"):
        load("digits5", normalise=((0.1, 0.2), (1.0,)))


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_all_or_nothing_cannot_be_held_out(share):
    with pytest.raises(DataError, match="hold_out must lie between 0 and 1"):
        load("digits5", hold_out=share)


def test_clients_of_whom_nothing_can_be_held_out_are_named_and_all_of_them_refused():
    x = np.arange(40.0).reshape(20, 2)
    one = (x[:2], [0, 1], x[:2], [0, 1])  # a single example of each class
    many = (x, np.arange(20) % 2, x[:2], [0, 1])
    held = held_out(clients({"a": one, "b": many}), 0.3, 0)
    assert held.notes[-1] == "nothing could be held out of a: no score is theirs"
    with pytest.raises(DataError, match=r"hold_out = 0.3 sets nothing aside"):
        held_out(clients({"a": one, "b": one}), 0.3, 0)


def wards(*, data_dir=None, share=0.5):
    """Two wards with one image each.

    More is not said in the list.
    """
    images = np.zeros((4, 2, 2), np.uint8)
    return clients({"a": (images, [0, 1] * 2), "b": (images, [0, 0, 1, 1])}, test_share=share)


@pytest.fixture
def entered(monkeypatch):
    def enter(entry):
        monkeypatch.setitem(DATASETS, "mine", entry)

    return enter


@pytest.mark.parametrize("kind", ["composed", "embedded", "file", "public", "own", "anything"])
def test_the_table_alone_decides_what_is_loaded_whatever_kind_is_written_there(entered, kind):
    entered(Entry(kind, "mine", wards, options=("share",)))
    assert [site.name for site in load("mine").sites] == ["a", "b"]


def test_a_function_is_entered_with_its_first_line_and_its_keywords(entered):
    entry = entry_of(wards)
    assert entry.description == "Two wards with one image each."
    assert entry.options == ("share",)
    entered(entry)
    assert [len(site.test) for site in load("mine", share=0.25).sites] == [2, 2]
    assert len(load("mine", partition=Iid(4)).sites) == 4


def test_a_set_of_ones_own_may_be_one_set_that_a_partition_splits(entered):
    entered(Entry("own code", "one set", lambda: image_set([0, 1] * 10)))
    assert [site.name for site in load("mine").sites] == ["all"]
    assert len(load("mine", partition=Iid(5)).sites) == 5


def test_what_a_function_does_not_take_or_should_not_give_is_named(entered):
    entered(entry_of(wards))
    with pytest.raises(DataError, match="mine takes no size and no channels; leave it out"):
        load("mine", size=8, channels=3)
    with pytest.raises(DataError, match="unknown option of mine 'shares'; did you mean 'share'"):
        load("mine", shares=1)
    entered(Entry("own code", "nothing", lambda: {}))
    with pytest.raises(DataError, match=r"mine must give a Collection or a LabelledSet.* a dict"):
        load("mine")


def test_what_was_not_said_is_left_to_the_defaults_of_a_function(entered):
    seen = []

    def mine(*, data_dir="here", size=8, channels):
        seen.append((data_dir, size, channels))
        return image_set([0, 1])

    entered(entry_of(mine))
    load("mine")
    load("mine", data_dir="there", channels=3)
    assert seen == [("here", 8, None), ("there", 8, 3)]
