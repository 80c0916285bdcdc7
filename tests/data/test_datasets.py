"""Named sets are read whole or refused with the file's name; real files if a folder is given."""

import os
import sys
import zipfile

import numpy as np
import pytest

from data.made_up import colour_file, colour_pictures, grey_file, mosaic
from fedstill.core.errors import DataError
from fedstill.data import archives, load
from fedstill.data.datasets import NAMED_SETS, named_set
from fedstill.data.federations import DIGITS_CLIENTS
from fedstill.data.images import blurred, resized


def test_mnist_is_read_as_one_channel_of_28(tmp_path):
    grey_file(tmp_path / "mnist.npz")
    made = named_set("mnist", data_dir=tmp_path)
    assert made.train.shape == (1, 28, 28)
    assert made.train.inputs[0, 0, 0, :3].tolist() == [0, 1, 2]
    assert (made.mean, made.std) == ((0.1307,), (0.3081,))
    assert made.notes == ("mnist: a subset, 30 of 60000 train and 30 of 10000 test examples",)


def test_size_and_channels_are_applied_and_the_normalisation_follows(tmp_path):
    grey_file(tmp_path / "mnist.npz")
    made = named_set("mnist", data_dir=tmp_path, size=32, channels=3)
    assert made.train.shape == made.test.shape == (3, 32, 32)
    assert made.mean == (0.1307,) * 3


def test_a_mosaic_gives_back_every_image(tmp_path):
    colour_file(tmp_path / "svhn.npz", count=23)
    made = named_set("svhn", data_dir=tmp_path)
    expected = colour_pictures(23, 8, seed=0).transpose(0, 3, 1, 2)
    assert np.array_equal(made.train.inputs, expected)


def test_cifar10_is_put_together_from_three_files(tmp_path):
    colour_file(tmp_path / "cifar10-train-a.npz", parts=("train",), count=20)
    colour_file(tmp_path / "cifar10-train-b.npz", parts=("train",), count=10)
    with pytest.raises(DataError, match=r"cifar10-test.npz there; such a file holds train_im"):
        named_set("cifar10", data_dir=tmp_path)
    colour_file(tmp_path / "cifar10-test.npz", parts=("test",), count=10)
    made = named_set("cifar10", data_dir=tmp_path)
    assert (len(made.train), len(made.test)) == (30, 10)


def test_the_surrogate_says_so(tmp_path):
    colour_file(tmp_path / "synthdigits-surrogate.npz")
    assert "surrogate" in load("synthdigits", data_dir=tmp_path).notes[0]


def test_an_unset_or_missing_folder_is_explained(tmp_path):
    with pytest.raises(
        DataError, match=r"data_dir is not set; set it, or --data-dir on the command"
    ):
        load("mnist")
    with pytest.raises(DataError, match=r"data_dir must be a folder, but .*nowhere is not one"):
        load("mnist", data_dir=tmp_path / "nowhere")


def test_a_missing_file_is_named_with_the_key_and_what_to_do(tmp_path):
    with pytest.raises(DataError, match=r"mnist\.npz.*data_dir is .*put mnist\.npz there"):
        load("mnist", data_dir=tmp_path)


def test_a_cut_off_file_is_refused(tmp_path):
    path = grey_file(tmp_path / "mnist.npz")
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(DataError, match=r"mnist\.npz is not a whole \.npz file"):
        load("mnist", data_dir=tmp_path)


@pytest.mark.parametrize("content", [b"", b"hello", b"\x93NUMPY\x01\x00"])
def test_a_file_of_another_kind_is_refused(tmp_path, content):
    (tmp_path / "mnist.npz").write_bytes(content)
    with pytest.raises(DataError, match=r"mnist\.npz is not a whole \.npz file"):
        load("mnist", data_dir=tmp_path)


def test_changed_bytes_inside_are_noticed(tmp_path):
    path = grey_file(tmp_path / "mnist.npz")
    content = bytearray(path.read_bytes())
    content[200:240] = bytes(40)
    path.write_bytes(bytes(content))
    with pytest.raises(DataError, match=r"mnist\.npz"):
        load("mnist", data_dir=tmp_path)


@pytest.mark.filterwarnings("ignore")
def test_python_objects_are_never_loaded(tmp_path):
    grey_file(tmp_path / "mnist.npz", train_labels=np.array([{}] * 30, object))
    with pytest.raises(DataError, match=r"train_labels holds Python objects"):
        load("mnist", data_dir=tmp_path)


def images(count=30, shape=(28, 28), dtype=np.uint8):
    return np.zeros((count, *shape), dtype)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"train_labels": None},
            "has no array train_labels, but .*train_images.*; such a file holds train_images",
        ),
        ({"test_images": None}, "has neither test_images nor test_images_webp"),
        ({"train_images": images(29)}, "train_images and train_labels .* have 29 and 30"),
        ({"train_images": images(dtype=np.int16)}, "train_images must be uint8 .* is int16"),
        ({"train_images": images(dtype=np.float32)}, "float32 .* but images as bytes"),
        ({"train_images": images(shape=(28,))}, r"must be uint8 .* but is uint8 \[30, 28\]"),
        ({"train_images": images(shape=(28, 28, 3))}, "must have 1 channels, but have 3"),
        ({"train_images": images(shape=(2, 2000))}, "up to 1024 pixels a side"),
        ({"train_labels": np.full(30, 10)}, r"labels must lie in 0..9, but 10"),
        ({"train_labels": np.full(30, -1)}, "train_labels must count from 0, but has -1"),
        ({"train_labels": np.zeros(30)}, "train_labels must be whole numbers .* is float64"),
        ({"train_labels": np.full(30, "cat")}, r"is <U3 \[30\]; store np.unique\(labels, return"),
        ({"class_names": np.array(["a"])}, "class_names must be 0, 1, .*, but are a"),
        ({"class_names": np.zeros(2)}, "class_names must be text"),
        ({"train_images": images(0), "train_labels": np.zeros(0, int)}, "not empty"),
    ],
)
def test_a_wrong_array_is_named_with_what_was_expected(tmp_path, changes, message):
    grey_file(tmp_path / "mnist.npz", **changes)
    with pytest.raises(DataError, match=message):
        load("mnist", data_dir=tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train_images_shape": None}, "has train_images_webp but no array train_images_shape"),
        ({"train_images_shape": np.array([30, 8, 8])}, "must be four whole numbers"),
        ({"train_images_shape": np.array([30, 8, 8, 1])}, r"must be \[N, H, W, 3\]"),
        ({"train_images_shape": np.array([0, 8, 8, 3])}, r"must be \[N, H, W, 3\]"),
        ({"train_images_shape": np.array([10**9, 8, 8, 3])}, "but at most 4294967296 are allowed"),
        ({"train_images_shape": np.array([300, 8, 8, 3])}, "does not hold the declared 300 images"),
        ({"train_images_shape": np.array([30, 9, 8, 3])}, "does not hold the declared 30 images"),
        ({"train_images_webp": np.zeros(50, np.uint8)}, "train_images_webp is not a whole WebP"),
        (
            {"train_images_webp": mosaic(colour_pictures(30, 8))[:900]},
            "train_images_webp is not a whole WebP",
        ),
    ],
)
def test_a_wrong_mosaic_is_refused_before_it_is_unfolded(tmp_path, changes, message):
    colour_file(tmp_path / "svhn.npz", **changes)
    with pytest.raises(DataError, match=message):
        load("svhn", data_dir=tmp_path)


def test_an_array_that_declares_more_than_the_file_holds_is_refused(tmp_path):
    path = tmp_path / "mnist.npz"
    grey_file(path)
    header = np.lib.format.magic(1, 0)
    text = "{'descr': '|u1', 'fortran_order': False, 'shape': (1000000, 28, 28), }"
    text = text.ljust(118 - 1) + "\n"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(
            "train_images.npy", header + len(text).to_bytes(2, "little") + text.encode()
        )
    with pytest.raises(DataError, match=r"train_images declares shape \[1000000, 28, 28\]"):
        load("mnist", data_dir=tmp_path)


def test_large_declarations_are_refused_by_the_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(archives, "LARGEST_ARRAY", 1000)
    grey_file(tmp_path / "mnist.npz")
    with pytest.raises(DataError, match=r"at most 1000 are allowed"):
        load("mnist", data_dir=tmp_path)


def test_a_missing_pillow_is_named_with_the_extra(tmp_path, monkeypatch):
    colour_file(tmp_path / "svhn.npz")
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(DataError, match=r"pip install 'fedstill\[images\]'"):
        load("svhn", data_dir=tmp_path)


def test_grey_sets_need_no_pillow(tmp_path, monkeypatch):
    grey_file(tmp_path / "mnist.npz")
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    assert load("mnist", data_dir=tmp_path, size=14).shape == (1, 14, 14)


@pytest.fixture
def five_files(tmp_path):
    for name in ("mnist", "usps"):
        grey_file(tmp_path / f"{name}.npz", count=50, side=16)
    for name in ("svhn", "synthdigits-surrogate", "mnist-m"):
        colour_file(tmp_path / f"{name}.npz", count=50)
    return tmp_path


def test_digits_as_desa_splits_the_merged_sets_and_normalises_each_client(five_files):
    made = load("DIGITS", data_dir=five_files)
    assert made.shape == (3, 32, 32)
    assert [site.name for site in made.sites] == list(DIGITS_CLIENTS)
    # 100 merged examples, 10 of each class: 80 train, 20 test.
    assert [(len(site), len(site.test)) for site in made.sites] == [(80, 20)] * 5
    assert made.sites[1].std == (0.1161, 0.1192, 0.1017)
    assert "MNIST: 80 train and 20 test examples" in made.notes
    assert any("surrogate" in note for note in made.notes)


def test_percent_keeps_the_first_part_of_7438_and_leaves_the_test_set(five_files):
    made = load("DIGITS", data_dir=five_files, percent=0.5)
    whole = load("DIGITS", data_dir=five_files)
    # 0.5 % of 7438 is 37.
    assert [(len(site), len(site.test)) for site in made.sites] == [(37, 20)] * 5
    for part, everything in zip(made.sites, whole.sites, strict=True):
        assert np.array_equal(part.pool.inputs, everything.pool.inputs[:37])
        assert part.test.digest() == everything.test.digest()


def test_digits_as_fedlgd_keeps_the_splits_and_one_normalisation(five_files):
    made = load("DIGITS", data_dir=five_files, style="fedlgd")
    assert made.shape == (3, 28, 28)
    assert {(len(site), len(site.test)) for site in made.sites} == {(50, 50)}
    assert {(site.mean, site.std) for site in made.sites} == {((0.5,) * 3, (0.5,) * 3)}


def test_of_mnist_m_the_middle_28_pixels_are_kept_where_there_are_more(five_files):
    colour_file(five_files / "mnist-m.npz", count=50, side=32)
    made = {
        crop: load("DIGITS", data_dir=five_files, **crop_option(crop)) for crop in (None, 0, 30)
    }
    images = {crop: found.sites[4].pool.inputs for crop, found in made.items()}
    whole = images[0]  # 32x32 already, so nothing is resampled
    assert np.array_equal(images[None], resized(whole[:, :, 2:30, 2:30], 32))
    assert np.array_equal(images[30], resized(whole[:, :, 1:31, 1:31], 32))
    assert "mnist-m: the middle 28x28 pixels of each image" in made[None].notes
    assert not any("middle" in note for note in made[0].notes)
    others = [site.pool.digest() for site in made[None].sites[:4]]
    assert others == [site.pool.digest() for site in made[0].sites[:4]]


def crop_option(crop):
    return {} if crop is None else {"mnist_m_crop": crop}


def test_as_fedlgd_mnist_m_is_kept_whole_unless_asked(five_files):
    colour_file(five_files / "mnist-m.npz", count=50, side=32)
    plain = load("DIGITS", data_dir=five_files, style="fedlgd")
    asked = load("DIGITS", data_dir=five_files, style="fedlgd", mnist_m_crop=28)
    raw = load("mnist-m", data_dir=five_files).sites[0].pool.inputs
    assert np.array_equal(plain.sites[4].pool.inputs, resized(raw, 28))
    assert np.array_equal(asked.sites[4].pool.inputs, raw[:, :, 2:30, 2:30])


def test_a_blur_spreads_a_pixel_as_a_gaussian_and_loses_what_leaves_the_image():
    dot = np.zeros((1, 1, 9, 9), np.uint8)
    dot[0, 0, 4, 4] = 255
    one = np.exp(-0.5 * (np.arange(-4, 5) / 0.75) ** 2)
    one[[0, -1]] = 0  # beyond four deviations
    one /= one.sum()
    assert np.abs(blurred(dot, 0.75)[0, 0] - 255 * np.outer(one, one)).max() <= 0.5 + 1e-5
    full = np.full((1, 1, 9, 9), 200, np.uint8)
    kept = one[4:].sum()  # of a pixel at the border one half and the middle stay
    found = blurred(full, 0.75)[0, 0]
    assert found[4, 4] == 200
    assert abs(found[0, 4] - 200 * kept) <= 0.5 + 1e-5
    assert abs(found[0, 0] - 200 * kept**2) <= 0.5 + 1e-5


def test_usps_can_be_smoothed_as_another_release_of_it_is(five_files):
    plain = load("DIGITS", data_dir=five_files)
    smooth = load("DIGITS", data_dir=five_files, usps_blur=0.75)
    raw = load("usps", data_dir=five_files).sites[0].pool.inputs
    assert smooth.sites[2].pool.digest() != plain.sites[2].pool.digest()
    assert "usps: smoothed by a Gaussian of 0.75 pixels" in smooth.notes
    for place in (0, 1, 3, 4):
        assert smooth.sites[place].pool.digest() == plain.sites[place].pool.digest()
    as_fedlgd = load("DIGITS", data_dir=five_files, style="fedlgd", usps_blur=0.75).sites[2]
    assert np.array_equal(as_fedlgd.pool.inputs[:, :1], resized(blurred(raw, 0.75), 28))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"usps_blur": -1}, "a blur's deviation must be above 0 and at most 8 pixels, but is -1"),
        ({"usps_blur": "0.75"}, "a blur's deviation must be above 0 and at most 8 pixels"),
        ({"usps_blur": True}, "a blur's deviation must be above 0 and at most 8 pixels"),
        ({"mnist_m_crop": 40}, "can be 1 to 8 pixels wide, but 40 was asked for"),
        ({"style": "dessa"}, "unknown style of DIGITS 'dessa'; did you mean 'desa'"),
        ({"style": "fedlgd", "percent": 10}, "percent belongs to style 'desa'"),
        ({"percent": 0}, "percent must lie in 0..100 and above 0, but is 0"),
        ({"persent": 10}, "unknown option of DIGITS 'persent'; did you mean 'percent'"),
    ],
)
def test_wrong_options_of_digits_are_explained(five_files, options, message):
    with pytest.raises(DataError, match=message):
        load("DIGITS", data_dir=five_files, **options)


def office_arrays(**changes):
    domains = (np.arange(40) % 4).astype(np.uint8)
    arrays = {
        "train_domains": domains,
        "test_domains": domains,
        "domain_names": np.array(["amazon", "caltech", "dslr", "webcam"]),
        "class_names": np.array(NAMED_SETS["office-caltech10"].class_names),
    }
    return {**arrays, **changes}


def test_office_gives_each_domain_its_own_train_test_and_normalisation(tmp_path):
    colour_file(tmp_path / "office-caltech10.npz", count=40, **office_arrays())
    made = load("OFFICE", data_dir=tmp_path)
    assert made.shape == (3, 32, 32)
    assert [(site.name, len(site), len(site.test)) for site in made.sites] == [
        ("amazon", 10, 10),
        ("caltech", 10, 10),
        ("dslr", 10, 10),
        ("webcam", 10, 10),
    ]
    assert made.sites[2].mean == (0.4794, 0.4545, 0.3985)
    expected = colour_pictures(40, 8, seed=1)[2::4].transpose(0, 3, 1, 2)
    assert np.array_equal(load("OFFICE", data_dir=tmp_path, size=8).sites[2].test.inputs, expected)


def test_office_is_split_again_by_a_seed_with_a_fifth_of_every_class_for_testing(tmp_path):
    labels = (np.arange(40) // 4) % 2
    colour_file(
        tmp_path / "office-caltech10.npz",
        count=40,
        **office_arrays(train_labels=labels, test_labels=labels),
    )
    as_it_is, first, again, other = (
        load("OFFICE", data_dir=tmp_path, size=8, **options)
        for options in ({}, {"split_seed": 1}, {"split_seed": 1}, {"split_seed": 2})
    )
    for old, new, same, apart in zip(
        as_it_is.sites, first.sites, again.sites, other.sites, strict=True
    ):
        assert (len(new), len(new.test)) == (16, 4)  # a fifth of ten and ten images
        assert np.bincount(new.test.labels).tolist() == [2, 2]
        whole = [
            sorted(
                image.tobytes() for image in np.concatenate([site.pool.inputs, site.test.inputs])
            )
            for site in (old, new)
        ]
        assert whole[0] == whole[1]  # no image is lost or used twice
        assert np.array_equal(new.test.inputs, same.test.inputs)
        assert not np.array_equal(new.test.inputs, apart.test.inputs)


@pytest.mark.parametrize("seed", [-1, True, 0.5])
def test_a_wrong_split_seed_of_office_is_refused(tmp_path, seed):
    colour_file(tmp_path / "office-caltech10.npz", count=40, **office_arrays())
    with pytest.raises(DataError, match="split_seed must be a whole number, 0 or more, but is"):
        load("OFFICE", data_dir=tmp_path, size=8, split_seed=seed)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train_domains": None}, "OFFICE needs train_domains, test_domains and domain_names"),
        ({"domain_names": None}, "has train_domains but no array domain_names"),
        ({"domain_names": np.array(list("abcd"))}, "needs the domains amazon.*has a, b, c, d"),
        ({"train_domains": np.full(40, 4)}, r"must hold 40 numbers in 0..3, but holds 40 up to 4"),
        ({"domain_names": np.array(["a", "a", "b", "c"])}, "must not name anything twice"),
    ],
)
def test_an_office_file_without_proper_domains_is_refused(tmp_path, changes, message):
    colour_file(tmp_path / "office-caltech10.npz", count=40, **office_arrays(**changes))
    with pytest.raises(DataError, match=message):
        load("OFFICE", data_dir=tmp_path)


@pytest.fixture(scope="module")
def real_folder():
    folder = os.environ.get("FEDSTILL_DATA_DIR")
    if not folder:
        pytest.skip("set FEDSTILL_DATA_DIR to a folder with the real sets to run this")
    return folder


@pytest.mark.parametrize("name", ["mnist", "usps", "mnist-m", "synthdigits", "acrima"])
def test_the_real_files_have_what_the_table_says(real_folder, name):
    table = NAMED_SETS[name]
    made = named_set(name, data_dir=real_folder)
    assert made.train.shape == table.shape
    assert len(made.train) <= table.published[0]
    assert (np.bincount(made.train.labels, minlength=len(table.class_names)) > 0).all()


def test_the_real_office_has_the_published_counts(real_folder):
    made = load("OFFICE", data_dir=real_folder)
    totals = [len(site) + len(site.test) for site in made.sites]
    assert totals == [958, 1123, 157, 295]


def test_the_real_usps_gives_desa_its_7438_and_1860(real_folder):
    from fedstill.data.federations import desa_site

    made = desa_site("USPS", named_set("usps", data_dir=real_folder), 32, 100, 0)
    assert (len(made), len(made.test)) == (7438, 1860)
