"""The error tree: one root, a name for every sample, errors that survive the trip between processes; and the checks."""

import pickle

import numpy as np
import pytest

from vlmpack import errors
from vlmpack.errors import ConfigError, LayoutError, SampleError, check_extra, check_whole_number


@pytest.mark.parametrize("kind", [errors.SampleError, errors.ConfigError])
def test_a_script_catches_a_bad_value_as_it_always_does(kind):
    with pytest.raises(ValueError, match="no image"):
        raise kind("no image")


def test_a_sample_error_names_the_sample_and_survives_pickling():
    assert str(SampleError("no image", index=3, reason="r")) == "sample 3: no image"
    error = pickle.loads(pickle.dumps(SampleError("no image", index=3, reason="r", sample_id="a")))
    assert (str(error), error.index, error.reason, error.sample_id) == ("sample 3 (id 'a'): no image", 3, "r", "a")


@pytest.mark.parametrize("value", [3, np.int64(3), np.uint8(3)])
def test_a_whole_number_comes_back_as_an_int(value):
    number = check_whole_number("depth", value, at_most=3)
    assert (number, type(number)) == (3, int)


@pytest.mark.parametrize("value", [True, False, 3.0, "3", None, np.float32(3), np.bool_(True), 0, -1])
def test_anything_else_is_no_whole_number_of_at_least_1(value):
    with pytest.raises(ConfigError, match=r"^depth must be a whole number of at least 1, got .+; leave it out$"):
        check_whole_number("depth", value, remedy="leave it out")


def test_the_limits_of_a_whole_number_and_the_kind_of_the_error():
    assert check_whole_number("id", -100, at_least=-100, at_most=5) == -100
    for value in (-101, 6):
        with pytest.raises(LayoutError, match=f"^id must be a whole number from -100 to 5, got {value}$"):
            check_whole_number("id", value, at_least=-100, at_most=5, error=LayoutError)


def test_missing_packages_are_named_with_the_extra_that_brings_them():
    check_extra("data", "json", "importlib.util", needed_by="a test")
    with pytest.raises(
        ConfigError, match=r"^a test needs no_such and none\.at_all, not installed here: pip install 'vlmpack\[data\]'$"
    ):
        check_extra("data", "json", "no_such", "none.at_all", needed_by="a test")
