"""The nineteen corruptions against their definitions."""

import numpy as np
import pytest

from fedstill.core.errors import DataError
from fedstill.data import corruptions, filters
from fedstill.data.corruptions import KINDS, SEVERITIES, corrupted

PUBLISHED = {
    "gaussian_noise", "shot_noise", "impulse_noise", "speckle_noise", "defocus_blur", "glass_blur",
    "motion_blur", "zoom_blur", "gaussian_blur", "snow", "frost", "fog", "brightness", "contrast",
    "elastic_transform", "pixelate", "jpeg_compression", "spatter", "saturate",
}  # fmt: skip
# By definition a higher severity of these takes an image farther from itself. The others change
# in kind: glass moves pixels or blurs more, frost darkens, elastic trades one warp for another,
# spatter turns from water to mud, saturate first takes colour away and then adds it.
GROWING = PUBLISHED - {"glass_blur", "frost", "elastic_transform", "spatter", "saturate"}


def level(value, count=40):
    """Images of one grey value."""
    return np.full((count, 3, 32, 32), value, np.uint8)


@pytest.fixture(scope="module")
def photographs():
    """Smooth coloured images with some detail, in place of photographs."""
    rng = np.random.Generator(np.random.PCG64(0))
    weights = filters.gaussian_weights(32, 2.0)
    images = filters.on_both_axes(weights, rng.random((40, 3, 32, 32), np.float32))
    images = 0.5 + (images - images.mean()) / images.std() * 0.2
    images += 0.04 * rng.standard_normal(images.shape)
    return corruptions.as_pixels(images)


def distance(one, other):
    return np.abs(one.astype(float) - other.astype(float)).mean()


def test_there_are_the_nineteen_kinds_with_five_severities_each():
    assert set(KINDS) == PUBLISHED and len(KINDS) == 19
    assert all(len(kind.values) == len(SEVERITIES) == 5 for kind in KINDS.values())


@pytest.mark.parametrize("kind", sorted(PUBLISHED))
def test_bytes_come_out_as_they_went_in_and_twice_the_same(photographs, kind):
    before = photographs.copy()
    for severity in (1, 5):
        first, again = (corrupted(photographs, kind, severity, seed=3) for _ in range(2))
        assert first.dtype == np.uint8 and first.shape == photographs.shape
        assert (first == again).all()
        assert distance(first, photographs) > 0.5
    np.testing.assert_array_equal(photographs, before)


DRAWN = PUBLISHED - {
    "defocus_blur", "zoom_blur", "gaussian_blur", "brightness", "contrast", "pixelate",
    "jpeg_compression", "saturate",
}  # fmt: skip


@pytest.mark.parametrize("kind", sorted(PUBLISHED))
def test_a_seed_changes_what_is_drawn_and_nothing_else(photographs, kind):
    one, other = (corrupted(photographs, kind, 3, seed=seed) for seed in (0, 1))
    assert (one != other).any() == (kind in DRAWN)


@pytest.mark.parametrize("kind", sorted(GROWING))
def test_a_higher_severity_is_farther_from_the_image(photographs, kind):
    far = [distance(corrupted(photographs, kind, s), photographs) for s in SEVERITIES]
    assert far == sorted(far), far


def test_images_of_one_chunk_do_not_depend_on_those_of_the_next(photographs):
    many = np.tile(photographs, (14, 1, 1, 1))  # 560 images, more than a chunk
    few = many[: corruptions.CHUNK]
    np.testing.assert_array_equal(
        corrupted(many, "snow", 2)[: corruptions.CHUNK], corrupted(few, "snow", 2)
    )


@pytest.mark.parametrize("severity, scale", list(enumerate((0.04, 0.06, 0.08, 0.09, 0.1), 1)))
def test_gaussian_noise_has_its_deviation(severity, scale):
    noisy = corrupted(level(127), "gaussian_noise", severity) / 255
    assert noisy.std() == pytest.approx(scale, rel=0.02)


@pytest.mark.parametrize("severity, photons", list(enumerate((500, 250, 100, 75, 50), 1)))
def test_shot_noise_has_the_variance_of_counts(severity, photons):
    noisy = corrupted(level(102), "shot_noise", severity) / 255
    assert noisy.mean() == pytest.approx(0.4, abs=0.005)  # cut off, not rounded: half a step below
    assert noisy.var() == pytest.approx(0.4 / photons, rel=0.05)


@pytest.mark.parametrize("severity, scale", list(enumerate((0.06, 0.1, 0.12, 0.16, 0.2), 1)))
def test_speckle_noise_grows_with_the_value(severity, scale):
    for value in (51, 102):
        noisy = corrupted(level(value), "speckle_noise", severity) / 255
        assert noisy.std() == pytest.approx(scale * value / 255, rel=0.02)


@pytest.mark.parametrize("severity, amount", list(enumerate((0.01, 0.02, 0.03, 0.05, 0.07), 1)))
def test_impulse_noise_is_half_salt_and_half_pepper(severity, amount):
    noisy = corrupted(level(127, 100), "impulse_noise", severity)
    for value in (0, 255):
        assert (noisy == value).mean() == pytest.approx(amount / 2, rel=0.05)
    assert (noisy == 127).mean() == pytest.approx(1 - amount, rel=0.001)


@pytest.mark.parametrize("severity, more", list(enumerate((0.05, 0.1, 0.15, 0.2, 0.3), 1)))
def test_brightness_raises_the_value_and_keeps_hue_and_saturation(severity, more):
    colour = np.array([100, 50, 25], np.uint8)[:, None, None] * np.ones((1, 3, 32, 32), np.uint8)
    raised = 100 / 255 + more
    expected = np.floor(255 * raised * np.array([1, 0.5, 0.25]) + 1e-3)
    np.testing.assert_array_equal(corrupted(colour, "brightness", severity)[0, :, 0, 0], expected)
    assert (corrupted(level(0), "brightness", severity) == int(255 * more + 1e-3)).all()
    assert (corrupted(level(255), "brightness", severity) == 255).all()


@pytest.mark.parametrize("severity, factor", list(enumerate((0.75, 0.5, 0.4, 0.3, 0.15), 1)))
def test_contrast_draws_every_channel_towards_its_mean(severity, factor):
    image = level(0, 1)
    image[:, :, :16] = 200  # mean 100
    found = corrupted(image, "contrast", severity)
    assert (found[:, :, :16] == int(100 + 100 * factor + 1e-3)).all()
    assert (found[:, :, 16:] == int(100 - 100 * factor + 1e-3)).all()


@pytest.mark.parametrize(
    "severity, factor, more",
    [(1, 0.3, 0), (2, 0.1, 0), (3, 1.5, 0), (4, 2, 0.1), (5, 2.5, 0.2)],
)
def test_saturate_changes_the_saturation_alone(severity, factor, more):
    colour = np.array([200, 150, 100], np.uint8)[:, None, None] * np.ones((1, 3, 32, 32), np.uint8)
    saturation = min(0.5 * factor + more, 1)
    expected = np.floor(200 * np.array([1, 1 - saturation / 2, 1 - saturation]) + 1e-3)
    np.testing.assert_array_equal(corrupted(colour, "saturate", severity)[0, :, 0, 0], expected)
    # Grey has hue 0, which is red.
    grey = corrupted(level(200), "saturate", severity)[0, :, 0, 0]
    assert grey.tolist() == [200, int(200 * (1 - more) + 1e-3), int(200 * (1 - more) + 1e-3)]


@pytest.mark.parametrize("severity, side", list(enumerate((30, 28, 27, 24, 20), 1)))
def test_pixelate_is_a_box_resize_down_and_up(photographs, severity, side):
    Image = pytest.importorskip("PIL.Image")

    def resized(image):
        small = Image.fromarray(image.transpose(1, 2, 0)).resize((side, side), Image.Resampling.BOX)
        return np.asarray(small.resize((32, 32), Image.Resampling.BOX)).transpose(2, 0, 1)

    expected = np.stack([resized(image) for image in photographs])
    np.testing.assert_array_equal(corrupted(photographs, "pixelate", severity), expected)


@pytest.mark.parametrize("sigma", [0.4, 0.6, 0.7, 0.8, 1.0])
def test_gaussian_weights_are_a_normal_density_cut_at_four_deviations(sigma):
    weights = filters.gaussian_weights(32, sigma)
    reach = int(4 * sigma + 0.5)
    density = np.exp(-0.5 * (np.arange(-reach, reach + 1) / sigma) ** 2)
    expected = np.zeros(32)
    expected[16 - reach : 16 + reach + 1] = density / density.sum()
    np.testing.assert_allclose(weights[16], expected, atol=1e-7)
    np.testing.assert_allclose(weights.sum(1), 1, rtol=1e-6)
    assert weights[0, 0] == pytest.approx(expected[: 16 + 1].sum(), rel=1e-6)  # the edge repeated


def test_blurs_and_zooms_agree_with_scipy(photographs):
    ndimage = pytest.importorskip("scipy.ndimage")
    images = photographs[:5].astype(np.float32) / 255
    for mode, mirrored in (("nearest", False), ("reflect", True)):
        weights = filters.gaussian_weights(32, 1.3, truncate=3, mirrored=mirrored)
        blurred = ndimage.gaussian_filter(images, (0, 0, 1.3, 1.3), mode=mode, truncate=3)
        np.testing.assert_allclose(filters.on_both_axes(weights, images), blurred, atol=1e-5)
    for factor in (1.03, 1.25, 1.75, 2.25):
        before = int(np.ceil(32 / factor))
        start = (32 - before) // 2
        crop = images[:, :, start : start + before, start : start + before]
        zoomed = ndimage.zoom(crop, (1, 1, factor, factor), order=1)
        cut = (zoomed.shape[2] - 32) // 2
        expected = zoomed[:, :, cut : cut + 32, cut : cut + 32]
        found = filters.on_both_axes(filters.zoom_weights(32, factor), images)
        np.testing.assert_allclose(found, expected, atol=1e-5)
    rng = np.random.Generator(np.random.PCG64(1))
    rows, columns = rng.uniform(-8, 40, (2, 5, 32, 32)).astype(np.float32)
    for mode, twice in (("reflect", True), ("mirror", False)):
        found = filters.sampled(images, rows, columns, twice=twice)
        for number, image in enumerate(images):
            places = [rows[number], columns[number]]
            expected = [ndimage.map_coordinates(c, places, order=1, mode=mode) for c in image]
            np.testing.assert_allclose(found[number], expected, atol=1e-4)


def test_a_disk_smaller_than_a_pixel_is_a_soft_point_and_a_larger_one_is_flat():
    side = np.exp(-0.5 * (np.arange(-1, 2) / 0.4) ** 2)
    side /= side.sum()
    np.testing.assert_allclose(corruptions.disk(0.3, 0.4)[1:4, 1:4], np.outer(side, side))
    np.testing.assert_allclose(corruptions.disk(1.5, 0.1)[1:4, 1:4], np.full((3, 3), 1 / 9))
    for radius, softness in KINDS["defocus_blur"].values:
        assert corruptions.disk(radius, softness).sum() == pytest.approx(1)


def test_motion_blur_draws_a_point_out_to_one_side():
    image = np.zeros((1, 1, 32, 32), np.float32)
    image[0, 0, 16, 16] = 1
    kernel = np.exp(-0.5 * (np.arange(7) / 1.0) ** 2)
    kernel /= np.exp(-0.5 * np.arange(13) ** 2.0).sum()
    across = filters.motion_blurred(image, np.zeros(1), radius=6, sigma=1)[0, 0]
    np.testing.assert_allclose(across[16, 16:9:-1], kernel, atol=1e-5)
    assert across[16, 17:].max() == across[:16].max() == 0
    steep = filters.motion_blurred(image, np.full(1, 45.0), radius=6, sigma=1)[0, 0]
    # Steps of 0.71 pixels both ways, on whole pixels: the second falls where the first does.
    assert steep[15, 15] == pytest.approx(kernel[1] + kernel[2], abs=1e-5)
    assert steep.sum() == pytest.approx(1, abs=1e-4)


def test_glass_blur_takes_pixels_from_above_or_the_left():
    """Severity 1 has no blur to speak of: every pixel is one of four old ones."""
    rng = np.random.Generator(np.random.PCG64(0))
    images = rng.integers(0, 256, (8, 3, 32, 32)).astype(np.uint8)
    found = corrupted(images, "glass_blur", 1)
    choices = [np.roll(images, (up, left), (2, 3)) for up in (0, 1) for left in (0, 1)]
    same = np.stack([(found == choice).all(1) for choice in choices])
    assert same.any(0)[:, 2:, 2:].all()
    np.testing.assert_array_equal(found[:, :, :2], images[:, :, :2])
    shares = same[:, :, 2:, 2:].mean((1, 2, 3))
    np.testing.assert_allclose(shares, 0.25, atol=0.02)


def test_fog_keeps_the_range_and_is_a_cloud_between_nought_and_one():
    clouds = filters.plasma(np.random.Generator(np.random.PCG64(0)), 20, 32, 2.0)
    assert clouds.min() == 0 and clouds.max() == 1
    assert (clouds.min((1, 2)) == 0).all() and (clouds.max((1, 2)) == 1).all()
    image = level(255, 4)
    assert corrupted(image, "fog", 5).max() <= 255
    black = corrupted(level(0, 4), "fog", 5)  # x * max / (max + c) with max 0
    assert black.max() == 0


def test_frost_is_the_image_and_a_piece_of_texture(photographs):
    textures = corruptions.frost_textures()
    assert textures.shape == (5, 3, 160, 160) and 0 <= textures.min() < textures.max() <= 1
    black = corrupted(level(0), "frost", 3) / 255
    assert black.mean() == pytest.approx(0.4 * textures.mean(), rel=0.1)
    added = corrupted(photographs, "frost", 1).astype(int) - photographs
    assert added.min() >= -1  # severity 1 keeps the whole image, up to the cut to bytes


def test_edges_frame_a_square_and_distance_counts_from_them():
    layer = np.zeros((1, 32, 32), np.float32)
    layer[0, 10:20, 10:20] = 200
    found = filters.edges(layer, 50, 150)[0]
    assert found[:9].sum() == found[21:].sum() == found[12:18, 12:18].sum() == 0
    assert found[15].sum() == 2 and found[:, 15].sum() == 2
    far = filters.distance_to(found[None], 20)[0]
    assert (far[found] == 0).all() and far[0, 0] == pytest.approx(
        np.sqrt((np.argwhere(found) ** 2).sum(1)).min()
    )
    assert (filters.distance_to(np.zeros((1, 32, 32), bool), 20) == 20).all()


def test_equalising_spreads_the_levels_that_are_there():
    levels = np.zeros((2, 2, 2), np.int64)
    levels[0] = [[1, 2], [3, 3]]
    levels[1] = 7
    found = filters.equalised(levels)
    # One of four is lowest and becomes 0; then 1/3 and 3/3 of what lies above it.
    assert found[0].tolist() == [[0, 85], [255, 255]]
    assert (found[1] == 7).all()


def test_bad_requests_are_named(photographs):
    with pytest.raises(
        DataError, match=r"unknown corruption 'fogg'; did you mean 'fog'\? known: b"
    ):
        corrupted(photographs, "fogg", 1)
    for severity in (0, 6, 2.5, True, "3"):
        with pytest.raises(DataError, match=r"severity must be a whole number in 1\.\.5"):
            corrupted(photographs, "fog", severity)
    for wrong in (photographs[:, :1], photographs[0], photographs.astype(np.float32),
                  photographs[:, :, :28, :28]):  # fmt: skip
        with pytest.raises(DataError, match=r"uint8 images \[image, 3, 32, 32\], but these are"):
            corrupted(wrong, "fog", 1)


def test_no_images_give_no_images(photographs):
    assert corrupted(photographs[:0], "snow", 1).shape == (0, 3, 32, 32)


def test_jpeg_without_pillow_says_what_to_install(photographs, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "PIL", None)
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(DataError, match=r"jpeg_compression needs PIL.*fedstill\[images\]"):
        corrupted(photographs, "jpeg_compression", 1)


def test_water_brightens_and_mud_covers():
    for severity in (1, 2, 3):
        added = corrupted(level(100), "spatter", severity).astype(int) - 100
        assert added.min() == 0 and 40 < added.max() <= 0.5 * 238
    for severity in (4, 5):
        found = corrupted(level(200), "spatter", severity)
        covered = (found[:, 0] < 190).mean()
        assert 0.001 < covered < 0.3
        darkest = found.reshape(len(found), 3, -1).min((0, 2))
        assert (darkest >= [63, 42, 20]).all() and (darkest < 100).all()


def test_snow_whitens_what_is_between_its_flakes():
    found = corrupted(level(100), "snow", 1) / 255
    # 0.95 x + 0.05 (1.5 x + 0.5), where no flake fell
    value = 100 / 255
    between = np.floor(255 * (0.95 * value + 0.05 * (1.5 * value + 0.5))) / 255
    assert found.min() == pytest.approx(between, abs=1.1 / 255)
    assert found.mean() > between
