"""The federation of corrupted CIFAR-10 images: who holds what, and what is refused."""

import os

import numpy as np
import pytest

from data.made_up import colour_file
from fedstill.core.errors import DataError
from fedstill.data import DATASETS, load
from fedstill.data.corrupted import proportional
from fedstill.data.corruptions import KINDS, corrupted
from fedstill.data.datasets import test_part as read_test_part

TWO = {"kinds": ["fog", "contrast"], "severities": [1, 5]}


@pytest.fixture
def folder(tmp_path):
    """Three hundred made-up images in the place of CIFAR-10's test set; no train files."""
    colour_file(tmp_path / "cifar10-test.npz", parts=("test",), count=300, side=32)
    return tmp_path


def test_the_papers_have_three_clients_for_each_of_nineteen_kinds(folder):
    made = load("cifar10c", data_dir=folder, severities=[3], images=200, min_per_class=1)
    assert [site.name for site in made.sites] == [f"{k}-{n}" for k in KINDS for n in (1, 2, 3)]
    assert len(made.sites) == 57 and made.shape == (3, 32, 32) and made.classes == 10
    assert {(site.mean, site.std) for site in made.sites} == {((0.0,) * 3, (1.0,) * 3)}
    assert any("frost is a surrogate" in note for note in made.notes)


def test_every_image_has_one_holder_and_no_image_is_trained_and_tested_on(folder):
    made = load("cifar10c", data_dir=folder, **TWO)
    base = read_test_part("cifar10", data_dir=folder)
    for kind in TWO["kinds"]:
        sites = [site for site in made.sites if site.name.startswith(kind)]
        rows = np.concatenate([site.rows for site in sites])
        assert sorted(rows.tolist()) == list(range(2 * 270))  # two severities, nine tenths of 300
        assert len({id(site.pool) for site in sites}) == 1
        assert sum(len(site.test) for site in sites) == 2 * 30
        expected = [corrupted(base.inputs, kind, s)[:270] for s in (1, 5)]
        np.testing.assert_array_equal(sites[0].pool.inputs, np.concatenate(expected))
        tests = np.concatenate([site.test.inputs for site in sites])
        last = np.concatenate([corrupted(base.inputs, kind, s)[270:] for s in (1, 5)])
        assert {i.tobytes() for i in tests} == {i.tobytes() for i in last}


def test_each_client_has_enough_of_every_class_and_tests_in_the_same_proportions(folder):
    made = load("cifar10c", data_dir=folder, **TWO, min_per_class=4)
    assert min(site.counts(10).min() for site in made.sites) >= 4
    for site in made.sites:
        held = site.counts(10) / 54  # of each class: 27 images in two severities
        tested = np.bincount(site.test.labels, minlength=10) / 6
        np.testing.assert_allclose(tested, held, atol=1 / 6)


def test_test_examples_are_dealt_as_the_train_examples_are():
    labels = np.repeat([0, 1], 8)
    dealt = [np.arange(0, 2), np.arange(2, 16)]  # a quarter of class 0 to the first client
    others = np.repeat([0, 1], 4)
    assert [rows.tolist() for rows in proportional(labels, dealt, others)] == [
        [0],
        [1, 2, 3, 4, 5, 6, 7],
    ]


def test_a_client_for_each_kind_and_severity(folder):
    made = load("cifar10c", data_dir=folder, **TWO, split="severity", images=100)
    names = ["fog-s1", "fog-s5", "contrast-s1", "contrast-s5"]
    assert [(site.name, len(site), len(site.test)) for site in made.sites] == [
        (name, 90, 10) for name in names
    ]
    base = read_test_part("cifar10", data_dir=folder)
    expected = corrupted(base.inputs[:100], "contrast", 5)
    np.testing.assert_array_equal(made.sites[3].pool.inputs, expected[:90])
    np.testing.assert_array_equal(made.sites[3].test.labels, base.labels[90:100])


def test_seeds_change_the_split_or_the_corruption_alone(folder):
    first, again, split, drawn = (
        load("cifar10c", data_dir=folder, kinds=["fog"], severities=[2], **seeds)
        for seeds in ({}, {"split_seed": 0}, {"split_seed": 1}, {"corruption_seed": 1})
    )
    assert first.digest() == again.digest()
    pools = [made.sites[0].pool.digest() for made in (first, split, drawn)]
    assert pools[0] == pools[1] != pools[2]
    assert (first.sites[0].rows == drawn.sites[0].rows).all()
    assert (
        len(first.sites[0]) != len(split.sites[0])
        or (first.sites[0].rows != split.sites[0].rows).any()
    )


def test_images_may_be_resized_and_split_by_another_partition(folder):
    small = load("cifar10c", data_dir=folder, size=28, **TWO, images=100, split="severity")
    assert small.shape == (3, 28, 28)
    merged = load(
        "cifar10c", data_dir=folder, **TWO, images=100, partition={"kind": "iid", "clients": 5}
    )
    assert [len(site) for site in merged.sites] == [72] * 5


@pytest.mark.parametrize(
    "options, message",
    [
        ({"kinds": ["fogg"]}, r"unknown corruption 'fogg'; did you mean 'fog'\?"),
        ({"kinds": "fog"}, "kinds must be a list, but is 'fog'"),
        ({"kinds": []}, "kinds must name at least one"),
        ({"severities": [1, 1]}, "severities must name at least one and each once"),
        ({"severities": [6]}, r"severity must be a whole number in 1\.\.5, but is 6"),
        ({"split": "severities"}, "did you mean 'severity'"),
        ({"images": 301}, r"images must lie in 10\.\.300, but is 301"),
        ({"images": 2.5}, r"images must be a whole number from 0 on, but is 2\.5"),
        ({"beta": 0}, "beta must be a finite number above 0, but is 0"),
        ({"beta": 1.0, "split": "severity"}, "belong to split 'dirichlet'"),
        ({"min_per_class": 60}, "60 images of every class of gaussian_noise; raise beta"),
        ({"clients_per_kind": 0}, "clients_per_kind must be a whole number from 1 on"),
        ({"sevrities": [1]}, "unknown option of cifar10c 'sevrities'; did you mean 'severities'"),
    ],
)
def test_bad_options_are_named(folder, options, message):
    few = {"kinds": ["gaussian_noise"], "severities": [1], **options}
    with pytest.raises(DataError, match=message):
        load("cifar10c", data_dir=folder, **few)


def test_a_missing_file_is_named_and_the_train_files_are_not_needed(tmp_path):
    assert DATASETS["cifar10c"].files == ("cifar10-test.npz",)
    with pytest.raises(DataError, match=r"cifar10 needs the file .*cifar10-test\.npz"):
        load("cifar10c", data_dir=tmp_path)


def test_images_of_another_size_are_refused(tmp_path):
    colour_file(tmp_path / "cifar10-test.npz", parts=("test",), count=30, side=8)
    with pytest.raises(DataError, match=r"cifar10c needs images of \(3, 32, 32\)"):
        load("cifar10c", data_dir=tmp_path)


def test_real_images_keep_their_look():
    """On CIFAR-10 itself: mild fog is nearer to the image than thick fog, and all classes stay."""
    place = os.environ.get("FEDSTILL_DATA_DIR")
    if place is None:
        pytest.skip("set FEDSTILL_DATA_DIR to a folder with cifar10-test.npz")
    made = load("cifar10c", data_dir=place, images=1000, split="severity", kinds=["fog", "snow"])
    base = read_test_part("cifar10", data_dir=place).inputs[:900].astype(float)
    far = [np.abs(site.pool.inputs - base).mean() for site in made.sites]
    assert far[:5] == sorted(far[:5]) and far[5] < far[9]
    assert all(site.counts(10).min() > 50 for site in made.sites)
