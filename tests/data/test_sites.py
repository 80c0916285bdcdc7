"""Records check themselves; statistics and digests can be redone by hand."""

import numpy as np
import pytest

from data.made_up import image_set
from fedstill.core.errors import DataError
from fedstill.data.images import (
    FEW,
    resampling,
    resized,
    statistics,
    stratified_split,
    with_channels,
)
from fedstill.data.partitioned import partitioned
from fedstill.data.partitions import Iid
from fedstill.data.preview import counts_table
from fedstill.data.sites import Collection, Examples, Site, held_out, pooled, whole_site


def examples(count=4, shape=(1, 2, 2), label=0):
    return Examples(np.zeros((count, *shape), np.uint8), np.full(count, label, np.int64))


def site(name="one", rows=(0, 1), **changes):
    values = {"pool": examples(), "test": examples(), "mean": (0.5,), "std": (0.5,), **changes}
    return Site(name=name, rows=np.array(rows, np.int64), **values)


@pytest.mark.parametrize(
    ("images", "labels", "message"),
    [
        (
            np.zeros((2, 1, 2, 2)),
            np.zeros(2, np.int64),
            r"must be images, .* float64 \[",
        ),
        (np.zeros((2, 5), np.uint8), np.zeros(2, np.int64), r"feature vectors.*uint8 \[2, 5\]"),
        (np.zeros((2, 2, 2), np.uint8), np.zeros(2, np.int64), r"came as uint8 \[2, 2, 2\]"),
        (np.zeros((2, 1, 2, 2), np.uint8), np.zeros(2), "labels must be int64 .* float64"),
        (np.zeros((2, 1, 2, 2), np.uint8), np.zeros(3, np.int64), "2 inputs and 3 labels"),
        (np.zeros((1, 1, 2, 2), np.uint8), np.array([-1]), "labels count from 0, but -1"),
    ],
)
def test_examples_of_another_form_are_refused(images, labels, message):
    with pytest.raises(DataError, match=message):
        Examples(images, labels)


COLOURED = {
    "pool": examples(shape=(3, 2, 2)), "test": examples(shape=(3, 2, 2)),
    "mean": (0.5,) * 3, "std": (0.5,) * 3,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rows": (0, 4)}, r"rows must lie in 0..3, but reach from 0 to 4"),
        ({"mean": (0.5, 0.5)}, "each of 1 channels, but have 2 and 1"),
        ({"std": (0.0,)}, "std above 0"),
        ({**COLOURED, "mean": (0.5, np.inf, 0.5)}, "must be finite"),
        ({**COLOURED, "std": (0.5, np.inf, 0.5)}, "must be finite"),
        ({"test": examples(shape=(3, 2, 2))}, "train and test inputs must have one shape"),
    ],
)
def test_a_site_of_another_form_is_refused(changes, message):
    with pytest.raises(DataError, match=message):
        site(**changes)


@pytest.mark.parametrize(
    ("sites", "message"),
    [
        ((), "has no client"),
        ((site(), site()), "client names must differ"),
        (
            (site(), site("two", pool=examples(shape=(1, 3, 3)), test=examples(shape=(1, 3, 3)))),
            "one has .* and two has .*; bring arrays to one shape, files by size",
        ),
        ((site(pool=examples(label=7)),), r"labels must lie in 0..1 for 2 classes, but 7"),
    ],
)
def test_a_collection_that_does_not_fit_together_is_refused(sites, message):
    with pytest.raises(DataError, match=message):
        Collection("made up", sites, ("a", "b"))


def test_statistics_are_those_of_pixels_between_zero_and_one():
    # Channel 0: 0 and 255: mean 1/2, std 1/2. Channel 1 is constant: std 1 by convention.
    images = np.array([0, 51, 255, 51], np.uint8).reshape(2, 2, 1, 1)
    assert statistics(images) == ((0.5, 0.2), (0.5, 1.0))


def test_statistics_of_nothing_are_refused():
    with pytest.raises(DataError, match=r"of no inputs are undefined"):
        statistics(np.zeros((0, 1, 2, 2), np.uint8))


def test_halving_averages_with_the_triangle_and_constants_stay():
    flat = np.full((2, 3, 8, 8), 77, np.uint8)
    assert (resized(flat, 5) == 77).all()
    assert (resized(flat, 19) == 77).all()
    # 4 -> 2: weights 3/7, 3/7, 1/7 at the border: 70 * 3/7 = 30 and 70 * 1/7 = 10.
    row = np.broadcast_to(np.array([70, 0, 0, 0], np.uint8), (1, 1, 4, 4))
    assert resized(row, 2)[0, 0].tolist() == [[30, 0], [30, 0]]


def test_enlarging_interpolates_between_pixel_centres():
    # Centres of 4 in 2: 0.25, 0.75, 1.25, 1.75: 0, 25 %, 75 % and all of the way from 0 to 200.
    row = np.broadcast_to(np.array([0, 200], np.uint8), (1, 1, 2, 2))
    assert resized(row, 4)[0, 0, 0].tolist() == [0, 50, 150, 200]


def test_many_images_are_resized_each_by_itself():
    # Wider than high, of two channels, and more than are treated at once.
    many = np.random.default_rng(0).integers(0, 256, (FEW + 3, 2, 6, 9), dtype=np.uint8)
    down, across = resampling(6, 7), resampling(9, 7)
    expected = [[np.floor(down @ one @ across.T + 0.5 + 1e-6) for one in image] for image in many]
    assert np.array_equal(resized(many, 7), np.array(expected))


@pytest.mark.parametrize("size", [0, -3, 1.5, 100_000, True])
def test_a_size_that_is_none_is_refused(size):
    with pytest.raises(DataError, match=r"size must be a whole number in 1..1024"):
        resized(np.zeros((1, 1, 2, 2), np.uint8), size)


def test_grey_is_repeated_and_colour_is_never_made_grey():
    grey = np.arange(4, dtype=np.uint8).reshape(1, 1, 2, 2)
    assert (with_channels(grey, 3) == grey).all()
    with pytest.raises(DataError, match=r"3 channels cannot be given 1"):
        with_channels(np.zeros((1, 3, 2, 2), np.uint8), 1)
    with pytest.raises(DataError, match=r"channels must be 1 or 3, but is 2"):
        with_channels(grey, 2)


def test_a_stratified_split_divides_every_class_and_adds_up():
    labels = np.repeat(np.arange(4), [10, 11, 2, 1])
    train, test = stratified_split(labels, test_share=0.25, seed=0)
    assert np.array_equal(np.sort(np.r_[train, test]), np.arange(24))
    # 2.5, 2.75, 0.5, 0.25 add up to 6: three with the largest rests go up, the single one trains.
    assert np.bincount(labels[test], minlength=4).tolist() == [3, 3, 1, 0]


def test_the_head_of_a_stratified_train_part_is_a_fair_sample():
    labels = np.repeat(np.arange(2), 1000)
    train, _ = stratified_split(labels, test_share=0.2, seed=0)
    assert abs(int(labels[train[:200]].sum()) - 100) < 30


def test_a_test_share_outside_zero_and_one_is_refused():
    with pytest.raises(DataError, match=r"test_share must lie between 0 and 1, but is 1"):
        stratified_split(np.zeros(4, np.int64), test_share=1, seed=0)


def test_the_digest_changes_with_pixels_rows_names_and_normalisation_but_not_with_notes():
    def digest(**changes):
        notes = changes.pop("notes", ())
        return Collection("made up", (site(**changes),), ("a", "b"), notes).digest()

    brighter = Examples(np.ones((4, 1, 2, 2), np.uint8), np.zeros(4, np.int64))
    assert digest() == digest(notes=("a note",))
    others = {digest(rows=(1, 0)), digest(name="two"), digest(mean=(0.4,)), digest(pool=brighter)}
    assert len(others | {digest()}) == 5


def test_pooling_clients_keeps_every_training_example_and_each_test_set_once():
    whole = image_set([0, 1, 0, 1, 1])
    parts = partitioned(whole, Iid(2), seed=0)
    together = pooled(parts)
    assert len(together.train) == 5
    assert len(together.test) == len(whole.test)
    assert together.domain_names == ("client-00", "client-01")
    assert together.domains.tolist() == [0, 0, 0, 1, 1]


def test_counts_are_listed_by_client_and_class():
    whole = image_set([0, 1, 1, 1])
    made = Collection("made up", (whole_site("one", whole.train, whole.test),), ("cat", "dog"))
    assert counts_table(made) == [{"client": "one", "cat": 1, "dog": 3, "total": 4}]


def test_a_class_called_like_a_column_is_refused():
    whole = image_set([0, 1])
    made = Collection("made up", (whole_site("one", whole.train, whole.test),), ("a", "total"))
    with pytest.raises(DataError, match=r"a class is called 'total'"):
        counts_table(made)


def vectors(*rows):
    """Feature vectors, all of class 0."""
    return Examples(np.array(rows, np.float32), np.zeros(len(rows), np.int64))


def test_examples_may_be_feature_vectors_or_images_as_floats():
    assert vectors([1, 2, 3], [4, 5, 6]).shape == (3,)
    assert Examples(np.zeros((2, 1, 4, 5), np.float32), np.zeros(2, np.int64)).shape == (1, 4, 5)


def test_statistics_of_floats_are_those_of_every_feature():
    # 1, 3: mean 2, std 1. Constant: std 1. -2, 4: mean 1, std 3.
    assert statistics(np.array([[1, 7, -2], [3, 7, 4]], np.float32)) == ((2, 7, 1), (1, 1, 3))
    # A constant that single precision does not hold exactly is a constant all the same.
    assert statistics(np.full((1000, 1), 0.1, np.float32))[1] == (1.0,)


def test_statistics_of_images_as_floats_are_those_of_every_channel():
    images = np.stack([np.zeros((2, 3, 3)), np.full((2, 3, 3), 4.0)], 1).astype(np.float32)
    images[0, 0] = 2.0
    assert statistics(images) == ((1.0, 4.0), (1.0, 1.0))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mean": (0.5,), "std": (1.0,)}, "for each of 2 features, but have 1 and 1"),
        ({"mean": None, "std": (1.0, 1.0)}, "give mean and std, or neither"),
        ({"test": vectors([1, 2, 3])}, r"one shape, but train has \(2,\) and test has \(3,\)"),
    ],
)
def test_a_site_of_vectors_of_another_form_is_refused(changes, message):
    both = vectors([1, 2], [3, 4])
    with pytest.raises(DataError, match=message):
        site(**{"pool": both, "test": both, "mean": (0, 0), "std": (1, 1), **changes})


def test_clients_with_bytes_and_clients_with_floats_do_not_mix():
    floats = Examples(np.zeros((4, 1, 2, 2), np.float32), np.zeros(4, np.int64))
    with pytest.raises(DataError, match="inputs of one type, but one has uint8 and two has float3"):
        Collection("made up", (site(), site("two", pool=floats, test=floats)), ("a",))
    with pytest.raises(DataError, match="train and test inputs must have one type"):
        site(test=floats)


def test_a_digest_tells_vectors_from_each_other_and_whether_they_are_normalised():
    def made(values, mean):
        both = vectors(*values)
        std = None if mean is None else (1.0, 1.0)
        sites = (site(pool=both, test=both, mean=mean, std=std),)
        return Collection("made up", sites, ("a",)).digest()

    one = [[1, 2], [3, 4]]
    found = {
        made(one, (0.0, 0.0)),
        made(one, None),
        made(one, (0.0, 1.0)),
        made([[1, 2], [3, 5]], None),
    }
    assert len(found) == 4
    assert made(one, None) == made(one, None)


def test_vectors_that_nobody_normalises_are_pooled_as_they_are():
    both = vectors([1, 2], [3, 4])
    sites = tuple(site(name, pool=both, test=both, mean=None, std=None) for name in ("one", "two"))
    whole = pooled(Collection("made up", sites, ("a",)))
    assert whole.mean is None and whole.std is None
    assert whole.train.inputs.tolist() == [[1, 2], [3, 4]] * 2


def test_vectors_are_held_out_like_images():
    rows = Examples(np.arange(40, dtype=np.float32).reshape(20, 2), np.arange(20) % 2)
    whole = Collection("made up", (whole_site("one", rows, rows),), ("a", "b"))
    (mine,) = held_out(whole, 0.2, 0).sites
    assert len(mine) == 16 and mine.test.inputs.shape == (4, 2)
