"""A user's own images: both layouts, files, and every way in which they can be wrong."""

import numpy as np
import pytest
from PIL import Image

from data.made_up import colour_file, grey_file, picture
from fedstill.core.errors import DataError
from fedstill.data import Iid, load
from fedstill.data.found import found_at


@pytest.fixture
def hospital(tmp_path):
    """A client's folder: three cats, two dogs."""
    for number in range(3):
        picture(tmp_path / "a" / "cat" / f"{number}.png", level=10 * number)
    for number in range(2):
        picture(tmp_path / "a" / "dog" / f"{number}.png", level=200 + number)
    return tmp_path / "a"


def test_class_folders_become_classes_and_a_fixed_part_becomes_the_test_set(hospital):
    made = load("own", clients={"a": hospital})
    again = load("own", clients={"a": str(hospital)})
    (site,) = made.sites
    assert made.class_names == ("cat", "dog")
    assert (len(site), len(site.test)) == (3, 2)
    assert np.bincount(site.test.labels).tolist() == [1, 1]
    assert made.digest() == again.digest()


def test_train_and_test_folders_are_kept_apart(tmp_path):
    picture(tmp_path / "train" / "cat" / "0.png", level=1)
    picture(tmp_path / "train" / "dog" / "0.png", level=2)
    picture(tmp_path / "test" / "dog" / "0.png", level=3)
    (site,) = load("own", clients={"a": tmp_path}).sites
    assert site.pool.labels.tolist() == [0, 1]
    assert site.test.labels.tolist() == [1]
    assert site.test.inputs.max() == 3


def test_classes_are_the_sorted_union_and_numbers_sort_as_numbers(tmp_path):
    for client, classes in (("a", ("10", "9")), ("b", ("2", "9"))):
        for name in classes:
            for number in range(2):
                picture(tmp_path / client / name / f"{number}.png")
    made = load("own", data_dir=tmp_path, clients={"a": "a", "b": "b"})
    assert made.class_names == ("2", "9", "10")
    assert [site.counts(3).tolist() for site in made.sites] == [[0, 1, 1], [1, 1, 0]]


def test_mean_and_std_are_the_clients_own_unless_given(hospital):
    (own,) = load("own", clients={"a": hospital}).sites
    levels = own.pool.inputs[:, 0, 0, 0] / 255
    assert own.mean == pytest.approx((levels.mean(),) * 3)
    assert own.std == pytest.approx((levels.std(),) * 3)
    (given,) = load("own", clients={"a": hospital}, mean=[0.1], std=[0.2]).sites
    assert (given.mean, given.std) == ((0.1,) * 3, (0.2,) * 3)


def test_size_and_channels_bring_images_to_one_shape(hospital):
    picture(hospital / "cat" / "large.png", side=20, colour=False)
    with pytest.raises(DataError, match=r"large\.png has 20 x 20 pixels, but .* 8 x 8; give size"):
        load("own", clients={"a": hospital})
    assert load("own", clients={"a": hospital}, size=6).shape == (3, 6, 6)
    assert load("own", clients={"a": hospital}, size=6, channels=1).shape == (1, 6, 6)


def test_files_and_folders_can_be_mixed(tmp_path, hospital):
    names = np.array(["dog", "cat"])
    path = colour_file(tmp_path / "b.npz", classes=2, class_names=names, count=10)
    made = load("own", clients={"a": hospital, "b": path})
    assert made.class_names == ("cat", "dog")
    # Label 0 of the file is a dog, which is class 1 of the union.
    assert made.sites[1].pool.labels[:2].tolist() == [1, 0]
    assert len(made.sites[1].test) == 10


def test_a_file_without_test_arrays_is_split(tmp_path):
    path = grey_file(tmp_path / "b.npz", test_images=None, test_labels=None)
    (site,) = load("own", clients={"b": path}, test_share=0.5, split_seed=3).sites
    # Three of each class: 1.5 each, so that five classes give one and five give two.
    assert (len(site), len(site.test)) == (15, 15)
    assert sorted(np.bincount(site.test.labels).tolist()) == [1] * 5 + [2] * 5


@pytest.mark.parametrize("left", ["test_labels", "test_images"])
def test_a_file_with_half_of_its_tests_is_refused_and_not_split(left, tmp_path):
    path = grey_file(tmp_path / "b.npz", **{left: None})
    with pytest.raises(DataError, match=left):
        load("own", clients={"b": path})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"split_seed": -1}, "split_seed must be a whole number from 0 on, but is -1"),
        ({"split_seed": 1.5}, "split_seed must be a whole number"),
        ({"test_share": "a"}, "test_share must be a number between 0 and 1, but is 'a'"),
        ({"test_share": 1.0}, "test_share must be a number between 0 and 1, but is 1.0"),
    ],
)
def test_wrong_options_of_own_data_are_named(options, message, hospital):
    with pytest.raises(DataError, match=message):
        load("own", clients={"a": hospital}, size=8, **options)


def test_one_number_normalises_all_channels_and_numbers_may_be_class_names(tmp_path):
    file = colour_file(tmp_path / "a.npz")
    one, three = (
        load("own", clients={"a": file}, mean=mean, std=(0.25,) * 3) for mean in (0.5, (0.5,) * 3)
    )
    assert one.digest() == three.digest()
    named = load("own", clients={"a": grey_file(tmp_path / "b.npz")}, class_names=range(10))
    assert named.class_names == tuple("0123456789")


def test_a_folder_and_a_file_of_one_name_are_two_clients(tmp_path, hospital):
    grey_file(tmp_path / "a.npz")
    grey_file(tmp_path / "b.npz")
    assert found_at(tmp_path).clients == {"a": "a", "a.npz": "a.npz", "b": "b.npz"}


def test_labels_that_nobody_has_are_noted(tmp_path):
    ones = 1 + np.arange(30) % 3
    path = grey_file(tmp_path / "a.npz", train_labels=ones, test_labels=ones)
    assert load("own", clients={"a": path}).notes == ("no example has label 0",)
    assert load("own", clients={"a": grey_file(tmp_path / "b.npz")}).notes == ()


def test_a_file_in_place_of_a_name_is_told_where_it_belongs():
    for name in ("mine.npz", "wards/table.csv"):
        with pytest.raises(DataError, match=rf"^{name} is a file, .* are the set 'own' with the"):
            load(name)


def test_a_partition_pools_the_clients(hospital):
    made = load("own", clients={"a": hospital}, partition={"kind": "iid", "clients": 3})
    assert [len(site) for site in made.sites] == [1, 1, 1]


def test_no_clients_are_refused():
    with pytest.raises(DataError, match=r"own data needs the option clients, .* e\.g\. { north"):
        load("own")
    with pytest.raises(DataError, match=r"clients must be a table"):
        load("own", clients=["a"])


def test_unknown_layouts_are_refused(tmp_path, hospital):
    with pytest.raises(DataError, match=r"client a: there is nothing at"):
        load("own", clients={"a": tmp_path / "nowhere"})
    with pytest.raises(DataError, match=r"nothing at nowhere in /.*; paths count from there, or"):
        load("own", clients={"a": "nowhere"})
    picture(tmp_path / "flat" / "0.png")
    with pytest.raises(DataError, match=r"flat has no class folders, so its layout is unknown"):
        load("own", clients={"a": tmp_path / "flat"})
    with pytest.raises(DataError, match=r"neither a folder nor an .npz file"):
        load("own", clients={"a": tmp_path / "flat" / "0.png"})
    (hospital / "train").mkdir()
    with pytest.raises(DataError, match=r"must hold train and test and no other.*cat, dog, train"):
        load("own", clients={"a": hospital})


def test_class_folders_without_images_are_refused(tmp_path):
    (tmp_path / "cat").mkdir()
    (tmp_path / "cat" / "readme.txt").write_text("none yet")
    with pytest.raises(DataError, match=r"no images in its class folders; known endings: \.png"):
        load("own", clients={"a": tmp_path})


def test_an_unreadable_image_is_named(hospital):
    (hospital / "cat" / "broken.png").write_bytes(b"not a picture")
    with pytest.raises(DataError, match=r"broken\.png cannot be read as an image"):
        load("own", clients={"a": hospital})


def test_a_cut_off_image_is_named(hospital):
    noise = np.random.Generator(np.random.PCG64(0)).integers(0, 256, (8, 8, 3)).astype(np.uint8)
    path = hospital / "cat" / "short.png"
    Image.fromarray(noise).save(path)
    path.write_bytes(path.read_bytes()[:120])
    with pytest.raises(DataError, match=r"short\.png cannot be read as an image"):
        load("own", clients={"a": hospital})


def test_all_broken_files_of_all_clients_are_named_at_once(tmp_path, hospital):
    for name in ("cat/one.png", "dog/two.png"):
        (hospital / name).write_bytes(b"not a picture")
    other = tmp_path / "other"
    picture(other / "cat" / "0.png")
    (other / "cat" / "three.png").write_bytes(b"")
    with pytest.raises(DataError) as refusal:
        load("own", clients={"a": hospital, "b": other})
    first, *lines = str(refusal.value).splitlines()
    assert first.startswith("3 image files cannot be read; repair or remove them, or set")
    assert all(name in line for name, line in zip(("one", "two", "three"), lines, strict=True))


def test_a_single_broken_file_is_spoken_of_as_one(hospital):
    (hospital / "cat" / "one.png").write_bytes(b"not a picture")
    with pytest.raises(DataError, match=r"1 image file .* repair or remove it, or .* leave it out"):
        load("own", clients={"a": hospital})


def test_a_single_client_that_is_split_is_not_said_to_be_merged(hospital):
    data = load("own", clients={"a": hospital}, partition=Iid(2))
    assert not any("merged" in note for note in data.notes)


def test_of_very_many_broken_files_some_are_named_and_the_rest_counted(hospital):
    for number in range(25):
        (hospital / "cat" / f"bad-{number:02}.png").write_bytes(b"not a picture")
    with pytest.raises(DataError, match=r"25 image files(.|\n)*bad-19.png(.|\n)*and 5 more"):
        load("own", clients={"a": hospital})


def test_broken_files_are_left_out_only_where_that_is_asked_for(hospital):
    whole = load("own", clients={"a": hospital})
    (hospital / "cat" / "broken.png").write_bytes(b"not a picture")
    rest = load("own", clients={"a": hospital}, on_broken="skip")
    assert rest.digest() == whole.digest()
    assert rest.notes[0].startswith("1 image file that cannot be read left out: ")
    with pytest.raises(DataError, match="on_broken must be stop or skip, but is 'yes'"):
        load("own", clients={"a": hospital}, on_broken="yes")


def test_a_client_all_of_whose_files_are_broken_is_refused_all_the_same(tmp_path):
    (tmp_path / "cat").mkdir()
    (tmp_path / "cat" / "broken.png").write_bytes(b"not a picture")
    with pytest.raises(DataError, match="1 image file cannot be read"):
        load("own", clients={"a": tmp_path})
    with pytest.raises(DataError, match="has no images in its class folders"):
        load("own", clients={"a": tmp_path}, on_broken="skip")


def test_pictures_of_sixteen_bits_are_scaled_to_eight(tmp_path):
    # 65535 becomes 255, so 13107, a fifth, becomes 51; with white = 13107 it becomes 255.
    for name in ("0.png", "1.png"):
        (tmp_path / "cat").mkdir(exist_ok=True)
        Image.fromarray(np.full((8, 8), 13_107, np.uint16)).save(tmp_path / "cat" / name)
    made = load("own", clients={"a": tmp_path})
    assert set(made.sites[0].pool.inputs.flatten().tolist()) == {51}
    assert made.shape == (3, 8, 8)
    assert made.notes == (
        "2 pictures of 16 bits became 8 bits, 65535 as 255; the largest value is 13107: "
        "white = 13107 would keep more",
    )
    bright = load("own", clients={"a": tmp_path}, white=13_107, channels=1)
    assert set(bright.sites[0].pool.inputs.flatten().tolist()) == {255}
    with pytest.raises(DataError, match="white must be a whole number above 0, but is 0"):
        load("own", clients={"a": tmp_path}, white=0)


def test_pixels_that_are_neither_eight_nor_sixteen_bits_are_refused(hospital):
    Image.fromarray(np.full((8, 8), 0.5, np.float32)).save(hospital / "cat" / "deep.tif")
    with pytest.raises(DataError, match=r"deep\.tif has pixels of mode F.*convert it first"):
        load("own", clients={"a": hospital})


def test_files_that_are_not_images_are_named_in_a_note(hospital):
    for name in ("a.dcm", "b.DCM", "readme"):
        (hospital / "cat" / name).write_text("")
    (hospital / "dog" / ".hidden").write_text("")
    assert load("own", clients={"a": hospital}).notes == (
        "files that are not read as images were passed over: .dcm (2), readme (1)",
    )


def test_what_archives_and_systems_leave_behind_is_no_class_no_client_and_no_note(hospital):
    picture(hospital / "__MACOSX" / "cat" / "._0.png")
    for name in ("__MACOSX", ".ipynb_checkpoints", "@eaDir"):
        (hospital / name).mkdir(exist_ok=True)
    for name in (".DS_Store", "Thumbs.db", "cat/Thumbs.db", "cat/desktop.ini"):
        (hospital / name).write_text("")
    picture(hospital.parent / "__MACOSX" / "cat" / "._0.png")
    made = load("own", clients={"a": hospital})
    assert (made.class_names, made.notes) == (("cat", "dog"), ())
    assert found_at(hospital.parent).clients == {"a": "a"}


def test_train_and_test_may_have_what_an_archive_left_beside_them(tmp_path):
    for part in ("train", "test"):
        picture(tmp_path / part / "cat" / "0.png")
    (tmp_path / "__MACOSX").mkdir()
    assert load("own", clients={"a": tmp_path}).class_names == ("cat",)


def test_a_file_of_feature_vectors_is_a_client(tmp_path):
    rows = np.arange(20.0).reshape(10, 2)
    np.savez(tmp_path / "a.npz", train_features=rows, train_labels=np.arange(10) % 2)
    made = load("own", clients={"a": tmp_path / "a.npz"})
    assert made.shape == (2,) and len(made.sites[0]) == 8
    with pytest.raises(DataError, match=r"a.npz holds float32 .* only these are resized"):
        load("own", clients={"a": tmp_path / "a.npz"}, size=8)
    np.savez(tmp_path / "b.npz", train_features=rows * np.nan, train_labels=np.arange(10) % 2)
    with pytest.raises(DataError, match=r"b.npz: train_features must be finite .* 10 of 10"):
        load("own", clients={"b": tmp_path / "b.npz"})


def test_classes_that_do_not_agree_are_named(tmp_path, hospital):
    path = grey_file(tmp_path / "b.npz", side=8)
    with pytest.raises(DataError, match=r"names must agree, but b has numbers and a has word"):
        load("own", clients={"a": hospital, "b": path}, channels=3)
    with pytest.raises(DataError, match=r"client a has classes .* not among class_names: dog"):
        load("own", clients={"a": hospital}, class_names=["cat", "cow"])


def test_labels_beyond_the_class_names_of_a_file_are_refused(tmp_path):
    path = grey_file(tmp_path / "b.npz", class_names=np.array(["cat", "dog"]))
    with pytest.raises(DataError, match=r"labels must lie in 0..1, but 9 came"):
        load("own", clients={"b": path})


def test_single_images_leave_nothing_to_test_on(tmp_path):
    picture(tmp_path / "cat" / "0.png")
    picture(tmp_path / "dog" / "0.png")
    with pytest.raises(DataError, match=r"client a has 2 images .* none is left to test on"):
        load("own", clients={"a": tmp_path})


def test_a_channel_number_other_than_one_or_three_is_refused(hospital):
    with pytest.raises(DataError, match=r"channels must be 1 or 3, but is 4"):
        load("own", clients={"a": hospital}, channels=4)
