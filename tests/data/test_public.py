"""Sets through torchvision, with a small stand-in for torchvision itself."""

import sys
from types import ModuleType

import numpy as np
import pytest

from fedstill.core.errors import DataError
from fedstill.data import load


class Pictures:
    """What the sets of the stand-in have in common: pairs of picture and label."""

    shape: tuple[int, ...] = (32, 32, 3)
    asked: list[dict] = []  # noqa: RUF012

    def __init__(self, root, download=False, **part):
        Pictures.asked.append({"root": root, "download": download, **part})
        if not download and not (root.endswith("full")):
            raise RuntimeError("Dataset not found. You can use download=True to download it")
        self.part = part

    def __iter__(self):
        level = 10 if True in self.part.values() or "train" in self.part.values() else 20
        for label in range(6):
            yield np.full(self.shape, level + label, np.uint8), label % 3


class CIFAR100(Pictures):
    classes = ("apple", "bear", "cup")


class KMNIST(Pictures):
    shape = (28, 28)


class SVHN(Pictures):
    pass


class Food101(Pictures):
    def __iter__(self):
        for label in range(3):
            yield np.zeros((20 + label, 30, 3), np.uint8), label


@pytest.fixture
def folder(tmp_path, monkeypatch):
    datasets = ModuleType("torchvision.datasets")
    for made_by in (CIFAR100, KMNIST, SVHN, Food101):
        setattr(datasets, made_by.__name__, made_by)
    monkeypatch.setitem(sys.modules, "torchvision", ModuleType("torchvision"))
    monkeypatch.setitem(sys.modules, "torchvision.datasets", datasets)
    monkeypatch.setattr(Pictures, "asked", [])
    (tmp_path / "full").mkdir()
    return tmp_path / "full"


def test_a_set_by_flag_is_read_with_its_classes_and_published_normalisation(folder):
    made = load("torchvision:CIFAR100", data_dir=folder)
    (site,) = made.sites
    assert made.shape == (3, 32, 32)
    assert made.class_names == ("apple", "bear", "cup")
    assert site.pool.inputs[:, 0, 0, 0].tolist() == [10, 11, 12, 13, 14, 15]
    assert site.test.inputs[0, 0, 0, 0] == 20
    assert site.mean == (0.5071, 0.4866, 0.4409)
    assert [asked["train"] for asked in Pictures.asked] == [True, False]


def test_a_set_by_word_is_asked_with_the_word(folder):
    load("torchvision:SVHN", data_dir=folder)
    assert [asked["split"] for asked in Pictures.asked] == ["train", "test"]


def test_a_grey_set_without_published_normalisation_uses_its_own(folder):
    made = load("torchvision:KMNIST", data_dir=folder, size=14, channels=3)
    assert made.shape == (3, 14, 14)
    assert made.class_names == ("0", "1", "2")
    # The mean of 10..15 is 12.5.
    assert made.sites[0].mean == pytest.approx((12.5 / 255,) * 3)


def test_images_of_many_sizes_need_a_size(folder):
    with pytest.raises(DataError, match=r"images of many sizes; give size"):
        load("torchvision:Food101", data_dir=folder)
    assert load("torchvision:Food101", data_dir=folder, size=16).shape == (3, 16, 16)


def test_nothing_is_fetched_unless_asked(folder):
    with pytest.raises(DataError, match=r"is not in data_dir .*set download to fetch"):
        load("torchvision:CIFAR100", data_dir=folder.parent)
    assert [asked["download"] for asked in Pictures.asked] == [False]
    load("torchvision:CIFAR100", data_dir=folder.parent, download=True)
    assert [asked["download"] for asked in Pictures.asked] == [False, True, True]


def test_a_torchvision_without_the_set_is_explained(folder):
    with pytest.raises(DataError, match=r"the installed torchvision has no set STL10"):
        load("torchvision:STL10", data_dir=folder)


def test_a_missing_torchvision_is_named_with_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torchvision.datasets", None)
    monkeypatch.setitem(sys.modules, "torchvision", None)
    with pytest.raises(DataError, match=r"pip install 'fedstill\[torchvision\]'"):
        load("torchvision:CIFAR100", data_dir=tmp_path)
