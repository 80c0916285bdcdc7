"""Public images: any set in the shape of the clients', without labels."""

import numpy as np
import pytest

from data.made_up import colour_file, grey_file
from fedstill.core.errors import DataError
from fedstill.data import load, public_images
from fedstill.data.images import recoloured, resized


def test_grey_images_are_repeated_and_resized_as_everywhere(tmp_path):
    grey_file(tmp_path / "fashion-mnist.npz", class_names=None)
    made = public_images("fashion-mnist", (3, 16, 16), data_dir=tmp_path)
    same = load("fashion-mnist", data_dir=tmp_path, size=16, channels=3).sites[0].pool
    assert made.inputs.shape == (30, 3, 16, 16)
    assert (made.inputs == same.inputs).all()


def test_colour_becomes_luminance(tmp_path):
    colour_file(tmp_path / "svhn.npz")
    made = public_images("svhn", (1, 8, 8), data_dir=tmp_path)
    red, green, blue = load("svhn", data_dir=tmp_path).sites[0].pool.inputs[4, :, 2, 5] / 1.0
    wanted = resized(load("svhn", data_dir=tmp_path).sites[0].pool.inputs, 8)
    assert made.inputs.shape == (30, 1, 8, 8)
    assert abs(made.inputs[4, 0, 2, 5] - (0.299 * red + 0.587 * green + 0.114 * blue)) <= 0.51
    assert (recoloured(wanted, 1) == made.inputs).all()
    grey = np.repeat(np.arange(256, dtype=np.uint8).reshape(1, 1, 16, 16), 3, axis=1)
    assert (recoloured(grey, 1) == grey[:, :1]).all()


def test_they_are_normalised_by_their_own_statistics():
    made = public_images("digits5", (3, 16, 16), count=40)
    scaled = (made.inputs / 255 - np.reshape(made.mean, (3, 1, 1))) / np.reshape(
        made.std, (3, 1, 1)
    )
    assert scaled.mean((0, 2, 3)) == pytest.approx(0, abs=1e-6)
    assert scaled.std((0, 2, 3)) == pytest.approx(1, abs=1e-6)


def test_some_are_drawn_by_the_seed_and_keep_their_order():
    whole = public_images("digits5", (3, 16, 16)).inputs
    first, again, other = (
        public_images("digits5", (3, 16, 16), count=50, seed=seed) for seed in (0, 0, 1)
    )
    assert first.digest() == again.digest() != other.digest()
    rows = {image.tobytes(): i for i, image in enumerate(whole)}
    places = [rows[image.tobytes()] for image in first.inputs]
    assert places == sorted(set(places))
    assert max(places) > 1000  # of all domains, not the first one
    assert "public: 50 of 1500 images of digits5 as 3x16x16, without labels" in first.notes


def test_embedded_digits_are_made_in_any_size():
    assert public_images("digits5", (1, 8, 8), count=3).inputs.shape == (3, 1, 8, 8)
    assert public_images("digits5", (3, 32, 32), count=3).inputs.shape == (3, 3, 32, 32)


def test_no_field_holds_labels():
    made = public_images("digits5", (3, 16, 16), count=30)
    assert {*vars(made)} == {"name", "inputs", "mean", "std", "notes"}


def test_more_than_there_are_cannot_be_drawn():
    with pytest.raises(DataError, match="count is 1501, but digits5 has 1500 images; ask for at"):
        public_images("digits5", (3, 16, 16), count=1501)


def test_an_oblong_cannot_be_made(tmp_path):
    with pytest.raises(DataError, match=r"to a square only, but the clients' images have 10x12"):
        public_images("digits5", (3, 10, 12))
    colour_file(tmp_path / "svhn.npz")
    with pytest.raises(DataError, match="channels must be 1 or 3, but is 2"):
        public_images("svhn", (2, 8, 8), data_dir=tmp_path)
