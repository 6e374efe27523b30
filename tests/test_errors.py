"""The error tree: one root, a name for every sample, and errors that survive the trip between processes."""

import pickle

import pytest
from torch.utils.data import DataLoader

from vlmpack import errors
from vlmpack.errors import SampleError, VlmpackError


def test_every_error_has_the_one_root():
    found = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception)]
    kinds = [kind for kind in found if not issubclass(kind, Warning)]
    assert len(kinds) == 6
    assert all(issubclass(kind, VlmpackError) for kind in kinds)


@pytest.mark.parametrize("kind", [errors.SampleError, errors.ConfigError])
def test_a_script_catches_a_bad_value_as_it_always_does(kind):
    with pytest.raises(ValueError, match="no image"):
        raise kind("no image")


def test_a_sample_error_names_the_sample():
    assert str(SampleError("no image", index=3, reason="r")) == "sample 3: no image"
    assert str(SampleError("no image", index=3, reason="r", sample_id="a")) == "sample 3 (id 'a'): no image"


def test_a_sample_error_survives_pickling():
    error = pickle.loads(pickle.dumps(SampleError("no image", index=3, reason="r", sample_id="a")))
    assert (str(error), error.index, error.reason, error.sample_id) == ("sample 3 (id 'a'): no image", 3, "r", "a")


def refuse(samples):
    raise SampleError("no image", index=3, reason="r")


def test_a_sample_error_of_a_worker_is_still_a_sample_error():
    with pytest.raises(SampleError, match="sample 3: no image"):
        next(iter(DataLoader([1, 2], collate_fn=refuse, num_workers=1)))
