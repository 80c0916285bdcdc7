"""Which methods train on feature vectors, and which refuse them before the run."""

import pytest

import worlds
from fedstill.core.errors import BadValue
from fedstill.engines.play.batched import Batched
from fedstill.engines.play.in_process import InProcess
from fedstill.methods import METHODS
from fedstill.methods.desa import DeSA
from fedstill.methods.fedavg import FedAvg
from fedstill.testing import small

MATCHING = ("feddm", "feddualmatch", "fedlgd", "dynafed", "desa")  # without augmentation
GENERATORS_OF_IMAGES = ("vhl", "dfrd", "dense", "fedftg")
RUN = sorted(set(METHODS) - set(GENERATORS_OF_IMAGES))


def accuracy(log):
    """The mean accuracy of the last round."""
    found = [row for row in log.metrics if row.name == "accuracy"]
    last = [row.value for row in found if row.round == max(row.round for row in found)]
    return sum(last) / len(last)


@pytest.mark.parametrize("name", RUN)
def test_a_method_without_a_generator_of_images_learns_from_vectors(name):
    _, log = worlds.played(small(METHODS[name]), worlds.vectors(), 4)
    assert accuracy(log) > 0.5  # one third is chance


@pytest.mark.parametrize("name", MATCHING)
def test_matching_on_vectors_is_the_same_in_stacks(name):
    found = [
        accuracy(worlds.played(small(METHODS[name]), worlds.vectors(), 2, engine)[1])
        for engine in (InProcess, Batched)
    ]
    assert found[0] == pytest.approx(found[1], abs=0.02)


@pytest.mark.parametrize("name", GENERATORS_OF_IMAGES)
def test_a_generator_of_images_refuses_vectors_before_the_run(name):
    with pytest.raises(BadValue, match=r"its generator makes images .* of shape \(4,\); use"):
        worlds.experiment(small(METHODS[name]), worlds.vectors())


def test_anchors_of_a_generator_and_views_of_images_are_refused_before_the_run():
    with pytest.raises(BadValue, match="its generator makes images"):
        worlds.experiment(DeSA(anchors="generator"), worlds.vectors())
    with pytest.raises(BadValue, match=r"views = 'crop_flip' moves images .* use views = .none"):
        worlds.experiment(FedAvg(views="crop_flip"), worlds.vectors())
    worlds.experiment(FedAvg(views="crop_flip"), worlds.pictures())
