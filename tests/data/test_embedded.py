"""The embedded digits are the same on every machine, and no digit is in two places."""

import sys

import numpy as np
import pytest

from fedstill.core.errors import DataError
from fedstill.data import embedded, load
from fedstill.data.glyphs import segments, typefaces

# A change of these numbers is a new benchmark: results before and after cannot be compared.
DIGESTS = {
    16: "285f5afdcb818cecd19b33bb915da849a4482b3e2edcd7382c4b13efd4a58539",
    32: "c4482aa113e246b54c6786940db47628a27727cdb093f0da632ab71a0bdba960",
}


@pytest.fixture(scope="module")
def five():
    return embedded.embedded_digits(16)


@pytest.mark.parametrize("size", [16, 32])
def test_the_bytes_are_the_ones_that_were_published(size):
    made = embedded.embedded_digits(size)
    assert made.shape == (3, size, size)
    assert made.digest() == DIGESTS[size]


def test_each_domain_is_one_client_with_about_three_hundred_and_one_hundred_fifty(five):
    assert tuple(site.name for site in five.sites) == embedded.DOMAINS
    assert {len(site) for site in five.sites} == {300}
    assert {len(site.test) for site in five.sites} <= {149, 150}
    assert sum(len(site.test) for site in five.sites) == 747
    for site in five.sites:
        assert site.counts(10).min() >= 29
        assert np.bincount(site.test.labels).min() >= 14


def test_no_handwritten_digit_is_dealt_twice():
    hands = embedded.handwriting()
    parts = embedded.dealt(hands.labels, 4)
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(1797))


def test_clutter_never_shows_the_digit_itself_again():
    # With two digits the only other one is the other: row 0 must be made of digit 1, empty here.
    pieces = np.stack([np.ones((8, 8)), np.zeros((8, 8))])
    moved = embedded.fragments(pieces, embedded.generator("test"))
    assert moved[0].max() == 0
    assert moved[1].max() > 0


def test_inverted_is_bright_where_plain_is_dark(five):
    plain, inverted = five.sites[0], five.sites[1]
    assert plain.mean[0] < 0.35
    assert inverted.mean[0] > 0.65
    assert (plain.pool.inputs[:, 0] == plain.pool.inputs[:, 2]).all()


def test_colour_domains_have_colour(five):
    for site in five.sites[2:]:
        spread = np.ptp(site.pool.inputs.astype(int), axis=1).mean()
        assert spread > 10


@pytest.mark.parametrize("name", typefaces())
def test_every_typeface_draws_ten_different_digits_inside_the_box(name):
    face = typefaces()[name]
    drawn = [segments(glyph) for glyph in face.glyphs]
    assert len(drawn) == 10
    assert all(ends.min() >= -0.01 and ends.max() <= 1.01 for ends in drawn)
    ink = {
        embedded.inked(*embedded.posed(ends, face, np.full(7, 0.5)), face).tobytes()
        for ends in drawn
    }
    assert len(ink) == 10


@pytest.mark.parametrize("domain", embedded.DOMAINS)
def test_a_simple_rule_learns_each_domain_better_than_chance(five, domain):
    # Nearest class mean on the distance from the corner colour: far below a network, above 10 %.
    site = next(site for site in five.sites if site.name == domain)

    def contrast(images):
        floats = images.astype(float)
        corner = floats[:, :, :2, :2].mean((2, 3), keepdims=True)
        return np.abs(floats - corner).sum(1).reshape(len(images), -1)

    train, test = contrast(site.pool.inputs), contrast(site.test.inputs)
    means = np.stack([train[site.pool.labels == digit].mean(0) for digit in range(10)])
    nearest = ((test[:, None] - means[None]) ** 2).sum(2).argmin(1)
    assert (nearest == site.test.labels).mean() > 0.3


def test_other_sizes_and_channels_are_refused():
    with pytest.raises(DataError, match=r"sizes 16 and 32, but size is 20"):
        load("digits5", size=20)
    with pytest.raises(DataError, match=r"digits5 has 3 channels, but channels is 1"):
        load("digits5", channels=1)


def test_with_a_partition_the_domains_are_pooled():
    made = load("digits5", partition={"kind": "iid", "clients": 3})
    assert [len(site) for site in made.sites] == [500, 500, 500]
    assert len(made.sites[0].test) == 747
    assert len({site.mean for site in made.sites}) == 1


def test_a_missing_scikit_learn_is_named(monkeypatch):
    monkeypatch.setattr(embedded, "find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(DataError, match=r"digits needs sklearn.*pip install 'scikit-learn"):
        embedded.handwriting()


def test_digits_come_from_the_file_as_from_the_library_and_without_it_from_the_library(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    quick = embedded.handwriting()
    monkeypatch.setattr(embedded, "find_spec", lambda name: None)
    slow = embedded.handwriting()
    assert quick.ink.shape == (1797, 8, 8) and quick.ink.max() == 1.0
    assert np.array_equal(quick.ink, slow.ink) and np.array_equal(quick.labels, slow.labels)
