"""Arrays and data sets of torch and Hugging Face become a federation, or it is said why not."""

from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset, TensorDataset

from fedstill.core.errors import DataError
from fedstill.data import Dirichlet, Iid, clients, load, split, unlabelled

LABELS = np.arange(20) % 4


def vectors(count=20, features=3):
    return np.arange(count * features, dtype=np.float64).reshape(count, features)


def pixels(*shape):
    return (np.arange(np.prod(shape)) % 251).astype(np.uint8).reshape(shape)


# One set, split


def test_vectors_are_split_over_clients_who_share_a_test_part():
    data = split(vectors(), LABELS, partition=Iid(2), seed=3)
    assert data.shape == (3,) and data.classes == 4
    # A fifth of each class of five is one example: 4 tests, 16 to train.
    assert len(data.sites[0].test) == 4 and [len(site) for site in data.sites] == [8, 8]
    assert data.sites[0].test is data.sites[1].test
    assert data.sites[0].pool.inputs.dtype == np.float32


@pytest.mark.parametrize(
    ("seed", "wrong"),
    [(None, "must be a whole number"), (-1, "must be at least 0"), (0.5, "a whole")],
)
def test_a_seed_that_would_not_give_the_same_split_again_is_refused(seed, wrong):
    for read in (partial(split, vectors(), LABELS), partial(load, "digits5")):
        with pytest.raises(DataError, match=f"seed = .*{wrong}"):
            read(partition=Iid(2), seed=seed)
    alike = [split(vectors(), LABELS, partition=Iid(2), seed=s) for s in (3, np.int64(3))]
    assert alike[0].digest() == alike[1].digest()


def test_the_test_part_does_not_depend_on_the_seed_of_the_split():
    one, other = (split(vectors(), LABELS, partition=Iid(2), seed=seed) for seed in (0, 1))
    assert np.array_equal(one.sites[0].test.inputs, other.sites[0].test.inputs)
    assert one.digest() != other.digest()


def test_without_a_partition_one_client_has_everything():
    data = split(vectors(), LABELS, test=(vectors(4), [0, 1, 2, 3]))
    assert [(site.name, len(site), len(site.test)) for site in data.sites] == [("all", 20, 4)]


def test_vectors_are_normalised_by_the_train_part_unless_told_otherwise():
    # Rows 0 and 1: feature 0 is 0 and 3, mean 1.5 and deviation 1.5.
    train, test = vectors(2), (vectors(1), [0])
    assert split(train, [0, 1], test=test).sites[0].mean == (1.5, 2.5, 3.5)
    assert split(train, [0, 1], test=test).sites[0].std == (1.5, 1.5, 1.5)
    assert split(train, [0, 1], test=test, normalise=None).sites[0].mean is None
    given = split(train, [0, 1], test=test, normalise=(0.5, [1.0, 2.0, 4.0])).sites[0]
    assert (given.mean, given.std) == ((0.5, 0.5, 0.5), (1.0, 2.0, 4.0))


@pytest.mark.parametrize(
    ("shape", "channels", "shown"),
    [
        ((20, 8, 6), None, (1, 8, 6)),
        ((20, 8, 6, 3), None, (3, 8, 6)),
        ((20, 3, 8, 6), None, (3, 8, 6)),
        ((20, 3, 8, 3), "first", (3, 8, 3)),
        ((20, 3, 8, 3), "last", (3, 3, 8)),
        ((20, 2, 8, 6), "first", (2, 8, 6)),
    ],
)
@pytest.mark.parametrize("kind", [np.uint8, np.float32, np.float64])
def test_images_come_in_every_order_of_axes(shape, channels, shown, kind):
    data = split(pixels(*shape).astype(kind), LABELS, channels=channels)
    assert data.shape == shown
    assert data.sites[0].pool.inputs.dtype == (np.uint8 if kind is np.uint8 else np.float32)


def test_what_was_guessed_of_axes_is_noted_and_what_was_said_is_not():
    assert split(pixels(20, 8, 6, 3), LABELS).notes == (
        "inputs of [8, 6, 3] were read with the channels last",
    )
    assert split(pixels(20, 8, 6, 3), LABELS, channels="last").notes == ()
    assert "grey images" in split(pixels(20, 8, 6), LABELS).notes[0]


def test_channels_last_become_first_pixel_by_pixel():
    images = pixels(20, 4, 5, 3)
    data = split(images, LABELS, test=(images, LABELS))
    assert data.sites[0].pool.inputs[7, 2, 3, 1] == images[7, 3, 1, 2]


def test_labels_may_be_texts_which_are_sorted():
    data = split(vectors(4), ["sick", "well", "sick", "well"], test=(vectors(1), ["well"]))
    assert data.class_names == ("sick", "well")
    assert data.sites[0].labels.tolist() == [0, 1, 0, 1]
    assert data.sites[0].test.labels.tolist() == [1]


def test_class_names_name_numbers_and_order_texts():
    assert split(vectors(), LABELS, class_names=list("abcd")).class_names == tuple("abcd")
    words = np.array(["b", "a"] * 5, dtype=object)
    data = split(vectors(10), words, test=(vectors(1), ["a"]), class_names=["b", "a"])
    assert data.sites[0].labels.tolist() == [0, 1] * 5


def test_a_class_that_nobody_has_is_noted():
    data = split(vectors(4), [1, 3, 1, 3])
    assert data.classes == 4 and data.notes == ("no example has label 0, 2",)


def test_a_class_that_only_tests_have_is_noted():
    said = ("in tests alone, without a training example: class 2",)
    tests = (vectors(3), [0, 1, 2])
    assert split(vectors(4), [0, 1, 0, 1], test=tests).notes == said
    assert split(vectors(4), [0, 1, 0, 2], test=tests).notes == ()
    own = {"a": (vectors(4), [0, 1, 0, 1]), "b": (vectors(4), [1, 1, 1, 1], *tests)}
    assert clients(own).notes == said
    assert clients({**own, "c": (vectors(4), [2, 2, 2, 2])}).notes == ()


@pytest.mark.parametrize("kind", [np.uint8, np.int16, np.uint64, bool])
def test_labels_may_have_any_whole_type(kind):
    data = split(vectors(6), (np.arange(6) % 2).astype(kind))
    assert data.class_names == ("0", "1") and data.sites[0].pool.labels.dtype == np.int64


def test_tensors_and_lists_are_arrays_too():
    array = vectors().astype(np.float32)
    expected = split(array, LABELS).digest()
    assert split(torch.from_numpy(array), torch.from_numpy(LABELS)).digest() == expected
    assert split(torch.tensor(array, requires_grad=True), LABELS.tolist()).digest() == expected
    assert split(list(array), list(LABELS)).digest() == expected
    assert split([torch.from_numpy(row) for row in array], LABELS).digest() == expected
    rough = split(torch.from_numpy(array).to(torch.bfloat16), LABELS)
    assert rough.sites[0].pool.inputs.dtype == np.float32


def test_an_array_that_must_not_be_written_to_is_copied_for_torch():
    images = pixels(20, 3, 4, 4)
    images.flags.writeable = False
    data = split(images, LABELS, test=(images[:4], LABELS[:4]))
    assert data.sites[0].pool.inputs.flags.writeable


@pytest.mark.parametrize(
    ("x", "y", "more", "message"),
    [
        (vectors(3), [0, 1], {}, "train: y has 2 labels for 3 examples"),
        (vectors(2) * np.nan, [0, 1], {}, "train: x must be finite .* 2 of 2 .* first at 0"),
        ([[1, 2], [3, np.inf]], [0, 1], {}, "1 of 2 examples are not, the first at 1"),
        (vectors(2), [0, -1], {}, "train: y counts classes from 0, but -1 is among .*; number the"),
        (vectors(2), [0.0, 1.0], {}, r"y must be whole numbers or texts.*y.astype\(int\)"),
        (vectors(2), [0.5, 1.0], {}, "but is float64; classes are counted from 0"),
        (vectors(2), [[0], [1]], {}, r"\[2, 1\]; use y.ravel\(\)"),
        (vectors(2), [[0, 1], [1, 0]], {}, r"\[2, 2\]; use y.argmax\(1\)"),
        (vectors(2), [0, 5000], {}, "y reaches 5000 with 2 examples; number the classes from 0"),
        (vectors(2), [0, 2], {"class_names": ["a", "b"]}, r"must lie in 0..1 .* but 2 is among"),
        (vectors(2), ["a", "c"], {"class_names": ["a", "b"]}, "not among class_names: c; known"),
        (vectors(2), [0, 1], {"class_names": ["a", "a"]}, "must name each class once"),
        (np.zeros((0, 3)), [], {}, "train: y is empty"),
        ([], [], {}, "x is empty"),
        (np.arange(3.0), [0, 1, 0], {}, r"has 1 axes, \[3\]"),
        (pixels(20, 5, 6, 7), LABELS, {}, "channels may be the second axis or the last; say ch"),
        (pixels(20, 3, 6, 3), LABELS, {}, "channels may be the second axis or the last; say ch"),
        (pixels(20, 3, 6, 6), LABELS, {"channels": "middle"}, "'first', 'last' or left out"),
        (pixels(20, 6, 6).astype(np.uint16) * 9, LABELS, {}, "but is uint16; divide by its larg"),
        (pixels(20, 6, 6).astype(np.int64), LABELS, {}, r"but is int64; use astype\(np.uint8\)"),
        ([np.zeros((4, 4)), np.zeros((5, 4))], [0, 1], {}, r"0 has \[4, 4\] and number 1 has \[5"),
        (np.array([[1, "a"]], dtype=object), [0], {}, "x holds Python objects, not numbers"),
        (np.array([["a", "b"]]), [0], {}, "x must hold numbers, but holds <U1"),
        (vectors(4), None, {}, r"train has inputs but no labels; give a pair"),
        (vectors(4), [0, 1, 0, 1], {"test": vectors(1)}, "test has inputs but no labels"),
        (vectors(4), [0, 1, 0, 1], {"normalise": "yes"}, r"'auto', None or a pair"),
        (vectors(4), [0, 1, 0, 1], {"normalise": (0, 0)}, "std above 0"),
        (vectors(4), [0, 1, 0, 1], {"normalise": ((0, 0), 1)}, "each of 3 features, but have 2"),
        (vectors(4), [0, 1, 0, 1], {"partition": 10}, r"such as Dirichlet\(10, 0.5\), but is 10"),
        (
            vectors(4),
            [0, 1, 0, 1],
            {"partition": "iid"},
            r"such as Dirichlet\(10, 0.5\), but is 'i",
        ),
        (
            "x.csv",
            "y.csv",
            {},
            "x must hold numbers, but holds <U5; of files, read the numbers first",
        ),
        (vectors(4), [0, 1, 2, 3], {}, "no class with two, so that none is left to test on"),
        (vectors(4), [0, 1, 0, 1], {"test": (vectors(2, 2), [0, 1])}, "train and test inputs must"),
        (vectors(4), [0, 1, 0, 1], {"test": (vectors(1), ["a"])}, "numbers for all or texts for"),
        (vectors(2), ["a", float("nan")], {}, "texts alone or .* holds 'a' and nan; write all in"),
        (vectors(2), np.array(["a", None]), {}, "y has no value for 1 of 2 examples, .* at 1"),
        (vectors(2), np.array([["a"], ["b"]], object), {}, r"\[2, 1\]; use y.ravel\(\)"),
        (iter([1]), None, {}, "but is of type list_iterator; give all its examples as two arrays"),
        (SimpleNamespace(dataset=[1]), None, {}, "; give its data set, .dataset"),
    ],
)
def test_a_wrong_input_is_refused_in_a_sentence(x, y, more, message):
    with pytest.raises(DataError, match=message):
        split(x, y, **more)


def test_the_columns_of_a_table_may_be_numbers_and_truth_values():
    mixed = np.array([[0.5, True], [2.5, False], [1.5, True], [np.float32(0), False]], object)
    by_hand = np.array([[0.5, 1], [2.5, 0], [1.5, 1], [0, 0]])
    labels = [0, 0, 1, 1]
    assert split(mixed, labels).digest() == split(by_hand, labels).digest()
    assert split(mixed, np.array(labels, object)).digest() == split(by_hand, labels).digest()
    mixed[2, 0] = None
    with pytest.raises(DataError, match="1 of 4 examples are not, the first at 2"):
        split(mixed, labels)


def test_a_whole_table_is_refused_with_the_pair_to_write():
    table = SimpleNamespace(columns=["dose", "label"], to_numpy=None)
    for read in (lambda: split(table), lambda: clients({"a": table})):
        with pytest.raises(DataError, match=r"is a table of type SimpleN.* \(table\["):
            read()


# One set for each client


def test_every_client_brings_its_own():
    many, few = (vectors(10), np.arange(10) % 2), (vectors(5) + 7, [1] * 5)
    data = clients({"ward-a": many, "ward-b": few})
    first, second = data.sites
    assert [site.name for site in data.sites] == ["ward-a", "ward-b"]
    assert (len(first), len(first.test), len(second), len(second.test)) == (8, 2, 4, 1)
    assert data.class_names == ("0", "1") and first.mean != second.mean


def test_a_client_may_bring_tests_or_all_share_one():
    x, y = vectors(4), [0, 1, 0, 1]
    four = clients({"a": (x, y, x[:2], y[:2]), "b": {"train": (x, y), "test": (x[:1], [0])}})
    assert [(len(site), len(site.test)) for site in four.sites] == [(4, 2), (4, 1)]
    common = clients({"a": (x, y), "b": (x, y)}, test=(x[:3], y[:3]))
    assert common.sites[0].test is common.sites[1].test


def test_parts_that_are_not_read_are_named_in_the_notes():
    parts = {"train": (vectors(4), [0, 1, 0, 1]), "tset": (vectors(2), [0, 1])}
    assert split(parts).notes == ("x: train and test alone are read, not tset",)
    assert clients({"a": parts}).notes == ("client a: train and test alone are read, not tset",)


def test_classes_are_those_of_all_clients_together():
    data = clients({"a": (vectors(2), ["cat", "dog"]), "b": (vectors(2), ["ant", "dog"])},
                   test=(vectors(1), ["dog"]))  # fmt: skip
    assert data.class_names == ("ant", "cat", "dog")
    assert [site.labels.tolist() for site in data.sites] == [[1, 2], [0, 2]]


@pytest.mark.parametrize(
    ("data", "more", "message"),
    [
        ({}, {}, "but is dict without entries"),
        ([vectors(2)], {}, r"such as \{'ward-a': \(x, y\)\}, but is list"),
        ({"a": (vectors(2), [0])}, {}, "client a: y has 1 labels for 2 examples"),
        ({"a": (vectors(2), [0, 1], vectors(1))}, {}, "client a must be .* but has 3 parts"),
        ({"a": {"training": 3}}, {}, "client a must have 'train' and may have 'test', but has tra"),
        ({"a": {"image": 3, "label": 4}}, {}, r"but has image, label; columns .*: \(x, y\)"),
        ({"a": (np.zeros((0, 3)), [])}, {}, "client a: y is empty"),
        ({"a": (vectors(4), [0, 1, 0, 1]), "b": (vectors(4, 2), [0, 1, 0, 1])}, {},
         r"all clients need inputs of one shape, but a has \(3,\) and b has \(2,\)$"),
        ({"a": (vectors(2), [0, 1], vectors(2), [0, 1])}, {"test": (vectors(1), [0])},
         "tests of their own are with a, and test is everybody's"),
        ({"a": (vectors(4), [0, 0, 1, 1]), "b": (vectors(2), ["x", "x"])}, {}, "are of both kinds"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_client_is_said_with_its_name(data, more, message):
    with pytest.raises(DataError, match=message):
        clients(data, **more)


def test_public_inputs_have_no_labels():
    public = unlabelled(vectors(4))
    assert public.inputs.shape == (4, 3) and public.mean == (4.5, 5.5, 6.5)
    assert unlabelled(pixels(4, 5, 5, 3), normalise=None).inputs.shape == (4, 3, 5, 5)


# Data sets of torch


class Wards(Dataset):
    """Items as a user's data set gives them."""

    classes = ("sick", "well")

    def __init__(self, items):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __getitem__(self, place):
        return self.items[place]


def test_a_data_set_of_torch_is_read_item_by_item():
    items = [(torch.full((3, 4, 3), float(i)), i % 2) for i in range(10)]
    data = split(Wards(items), test=Wards(items[:4]))
    assert data.shape == (3, 4, 3)  # tensors of torch have their channels first
    assert data.class_names == ("sick", "well")
    assert data.sites[0].labels.tolist() == [0, 1] * 5


def test_a_tensor_data_set_is_read_at_once():
    x, y = torch.randn(10, 3), torch.arange(10) % 2
    assert split(TensorDataset(x, y)).digest() == split(x, y).digest()


class Scaled(TensorDataset):
    """Changes its examples as they are read."""

    def __getitem__(self, at):
        x, y = super().__getitem__(at)
        return 100 * x, y


class Transformed(Dataset):
    """Holds tensors as torch's own does, and a transform."""

    def __init__(self, *tensors):
        self.tensors = tensors

    def __len__(self):
        return len(self.tensors[1])

    def __getitem__(self, at):
        return 100 * self.tensors[0][at], self.tensors[1][at]


@pytest.mark.parametrize("kind", [Scaled, Transformed])
def test_a_data_set_with_tensors_that_changes_its_items_is_read_item_by_item(kind):
    x, y = torch.randn(10, 3), torch.arange(10) % 2
    read, plain = (split(given, normalise=None).sites[0] for given in (kind(x, y), (100 * x, y)))
    np.testing.assert_array_equal(read.pool.inputs, plain.pool.inputs)


def test_grey_pictures_of_eight_and_sixteen_bits_have_one_scale():
    pictures = [Image.fromarray(np.full((4, 5), 128 * deep, kind))
                for deep, kind in ((1, np.uint8), (257, np.uint16))]  # fmt: skip
    items = [(picture, label) for label, picture in enumerate(pictures)]
    (site,) = split(Wards(items), test=Wards(items)).sites
    assert np.unique(site.pool.inputs).tolist() == [pytest.approx(128 / 255)]


def test_pictures_of_a_data_set_are_bytes_with_channels_first():
    grey = Image.fromarray(np.full((4, 5), 7, np.uint8))
    colour = Image.fromarray(np.full((4, 5, 3), 9, np.uint8))
    (site,) = split(Wards([(grey, 0), (grey, 1)]), test=Wards([(grey, 0)])).sites
    assert site.pool.shape == (1, 4, 5) and site.pool.inputs.dtype == np.uint8
    (mixed,) = split(Wards([(grey, 0), (colour, 1)]), test=Wards([(colour, 0)])).sites
    assert mixed.pool.inputs[:, :, 0, 0].tolist() == [[7, 7, 7], [9, 9, 9]]


def test_pictures_of_sixteen_bits_become_floats_between_zero_and_one():
    deep = Image.fromarray(np.full((4, 5), 13107, np.uint16))  # a fifth of 65535
    (site,) = split(Wards([(deep, 0), (deep, 1)]), test=Wards([(deep, 0)])).sites
    assert site.pool.inputs.dtype == np.float32
    assert site.pool.inputs.max() == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ([], "train is empty"),
        ([torch.zeros(3)], r"must have items \(x, y\), but item 0 is a Tensor"),
        ([(torch.zeros(3), 0, 1)], "item 0 is a tuple of 3"),
        ([(torch.zeros(3), 0), (torch.zeros(4), 1)], r"number 1 has \[4\]"),
        ([{"a": 1, "b": 2}], "which column is meant by image is not clear; say image=… with one"),
    ],
)
def test_items_of_another_form_are_refused(items, message):
    with pytest.raises(DataError, match=message):
        split(Wards(items))


@pytest.mark.parametrize("place", ["photos", Path("photos")])
def test_a_path_in_place_of_data_is_told_how_files_are_read(place):
    with pytest.raises(DataError, match=r"is the path 'photos'; .* fedstill.load\('own', data_dir"):
        split(place, partition=Iid(2))
    with pytest.raises(DataError, match=r"client a must be .* is the path 'photos'"):
        clients({"a": place})


def test_public_data_are_told_in_one_line():
    assert repr(unlabelled(np.zeros((5, 8, 8)))) == "<Unlabelled public: 5 inputs of 1x8x8>"


def test_items_that_are_tables_are_read_by_their_keys():
    items = [{"x": [1.0, float(i)], "diagnosis": i % 2} for i in range(10)]
    assert split(Wards(items), label="diagnosis").shape == (2,)


# Data sets of Hugging Face


class Image_:
    """Stands for the library's type of a column of pictures."""


class ClassLabel:
    def __init__(self, names):
        self.names = names


Image_.__name__ = "Image"


class Table:
    """What the library's Dataset can do, as far as it is used here."""

    def __init__(self, columns, features):
        self.columns, self.features = columns, features

    @property
    def column_names(self):
        return list(self.columns)

    def __len__(self):
        return len(next(iter(self.columns.values())))

    def __getitem__(self, column):
        return self.columns[column]


def photographs(count=10):
    pictures = [Image.fromarray(np.full((4, 5, 3), i, np.uint8)) for i in range(count)]
    columns = {"id": list(range(count)), "photo": pictures, "kind": [i % 2 for i in range(count)]}
    features = {"id": SimpleNamespace(), "photo": Image_(), "kind": ClassLabel(["ant", "bee"])}
    return Table(columns, features)


def test_columns_of_pictures_and_of_classes_are_found_by_their_types():
    data = split(photographs(), partition=Iid(2))
    assert data.shape == (3, 4, 5) and data.class_names == ("ant", "bee")


def test_a_table_with_train_and_test_is_split_as_it_comes():
    data = split({"train": photographs(), "test": photographs(4)})
    assert (len(data.sites[0]), len(data.sites[0].test)) == (10, 4)
    with pytest.raises(DataError, match="a test part of its own and test is another"):
        split({"train": photographs(), "test": photographs()}, test=photographs())


def test_columns_may_be_named_and_vectors_be_lists():
    features = {"embedding": SimpleNamespace(), "age": SimpleNamespace(), "ill": SimpleNamespace()}
    table = Table(
        {"embedding": [[1.0, 2.0], [3.0, 4.0]] * 3, "age": [3] * 6, "ill": ["no", "yes"] * 3},
        features,
    )
    data = split(table, label="ill")
    assert data.shape == (2,) and data.class_names == ("no", "yes")
    with pytest.raises(DataError, match="meant by label is not clear; say label=… with one of emb"):
        split(table)
    with pytest.raises(DataError, match="train has no column 'sick'; it has embedding, age, ill"):
        split(table, label="sick")


def test_clients_whose_classes_have_other_numbers_agree_by_name():
    def ward(names):
        return Table({"x": [[0.0], [1.0]], "label": [0, 1]},
                     {"x": SimpleNamespace(), "label": ClassLabel(names)})  # fmt: skip

    wards = {"a": ward(["ant", "bee"]), "b": ward(["bee", "cow"])}
    data = clients(wards, test=ward(["ant", "cow"]))
    assert data.class_names == ("ant", "bee", "cow")
    assert [site.labels.tolist() for site in data.sites] == [[0, 1], [1, 2]]
    assert data.sites[0].test.labels.tolist() == [0, 2]


def test_the_real_library_is_read_where_it_is_installed():
    library = pytest.importorskip("datasets")
    features = library.Features(
        {
            "x": library.Sequence(library.Value("float32")),
            "label": library.ClassLabel(names=["a", "b"]),
        }
    )
    table = library.Dataset.from_dict(
        {"x": [[1.0, 2.0]] * 6, "label": [0, 1] * 3}, features=features
    )
    assert split(table).class_names == ("a", "b")


def test_a_dirichlet_split_of_arrays_is_that_of_the_partition():
    labels = np.arange(300) % 3
    data = split(vectors(300), labels, test=(vectors(3), [0, 1, 2]), partition=Dirichlet(4, 0.5))
    expected = Dirichlet(4, 0.5).split(labels.astype(np.int64), 0)
    assert all(map(np.array_equal, (site.rows for site in data.sites), expected))


def test_two_pairs_are_told_how_four_arrays_are_written():
    pairs = ((vectors(4), np.arange(4) % 2), (vectors(2), np.arange(2)))
    with pytest.raises(DataError, match=r"client a is two pairs; write \(x, y, x_test, y_test\)"):
        clients({"a": pairs})
    assert split((*vectors(2),), (0, 1), test=(vectors(2), [0, 1])).sites[0].rows.tolist() == [0, 1]


def test_public_inputs_may_be_those_of_a_data_set_whose_labels_are_left_out():
    table = photographs()
    images = np.stack([np.asarray(picture) for picture in table["photo"]])
    expected = unlabelled(images, channels="last")
    pairs, alone = list(zip(table["photo"], table["kind"], strict=True)), table["photo"]
    tables = [{"image": photo, "label": kind} for photo, kind in pairs]
    for given in (table, Wards(pairs), Wards(alone), Wards(tables)):
        assert unlabelled(given).digest() == expected.digest()
    x = torch.randn(6, 3, 4, 3)
    assert unlabelled(TensorDataset(x, torch.zeros(6))).digest() == (
        unlabelled(x, channels="first").digest()
    )
    with pytest.raises(DataError, match="which column is meant by image is not clear"):
        unlabelled(Wards([{"scan": 1.0, "label": 0}]))
    with pytest.raises(DataError, match="but holds train, test; give one of them"):
        unlabelled({"train": table, "test": table})
