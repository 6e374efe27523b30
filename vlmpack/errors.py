"""The errors that vlmpack raises on purpose, and the argument checks that several packages share.

VlmpackError
├── SampleError    one sample cannot be used: which one, what was seen, what to do
├── LayoutError    a batch or row contradicts itself: masks, lengths, boundaries
├── BackendError   no attention back-end can serve this call, with the reasons of each one
├── FamilyError    the family of this model or processor is not supported, and why
├── ConfigError    settings contradict each other or the surrounding trainer
└── RequestError   a client of the step service sent an invalid request

UnpackedWarning, a UserWarning: a training step of an enabled model computes padding, or an evaluation of PackedTrainer
is not packed. The message says why.
SkippedWarning, a UserWarning: unusable samples are skipped. The message says where they are listed.

SampleError, ConfigError and RequestError are also ValueErrors, so scripts that catch ValueError for a bad data set or
argument keep working.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from numbers import Integral
from typing import Any, SupportsInt, cast


class VlmpackError(Exception):
    """Base class of all errors that vlmpack raises on purpose."""


class SampleError(VlmpackError, ValueError):
    """One sample, or a part of it such as an image, cannot be used: the error, and the record of it.

    Two errors are equal if their fields are.

    Args:
        message: what was seen and what to do about it, without the sample's name.
        reason: a short slug such as ``"image_token_mismatch"``, used as the key for counting.
        index: position of the sample in the data set, or in the list given to the collator. None: `message` already
            names the sample, for example when torch rebuilds the error of a DataLoader worker from its text.
        sample_id: the sample's id, if it has one.
    """

    def __init__(
        self, message: str, reason: str = "unknown", *, index: int | None = None, sample_id: str | int | None = None
    ) -> None:
        self.index = index
        self.sample_id = sample_id
        self.reason = reason
        self.detail = message
        if index is not None:
            message = f"sample {index}{'' if sample_id is None else f' (id {sample_id!r})'}: {message}"
        super().__init__(message)

    def of_sample(self, index: int | None, sample_id: str | int | None = None) -> SampleError:
        """Return the same error, of the sample with this index and id. None: the id is the error's own."""
        sample_id = self.sample_id if sample_id is None else sample_id
        return SampleError(self.detail, self.reason, index=index, sample_id=sample_id)

    def within(self, where: str) -> SampleError:
        """Return the same error, naming the part of the sample where it occurred."""
        return SampleError(f"{where}: {self.detail}", self.reason)

    def to_dict(self) -> dict[str, Any]:
        """Return index, sample_id, reason and detail, for JSON."""
        return {"index": self.index, "sample_id": self.sample_id, "reason": self.reason, "detail": self.detail}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SampleError) and self.to_dict() == other.to_dict()

    def __hash__(self) -> int:
        return hash((self.index, self.reason, self.detail))

    def __reduce__(self) -> tuple:
        """Pickle the constructor's arguments; the default would pass the finished text as `message`."""
        return _rebuild_sample_error, (self.to_dict(),)


class LayoutError(VlmpackError):
    """A batch or row contradicts itself; the message names the row, what was seen and the remedy."""


class BackendError(VlmpackError):
    """No attention back-end can serve the call; the message lists the reasons of each one."""


class FamilyError(VlmpackError):
    """vlmpack cannot pack the family of this model or processor exactly; the message says what would leak."""


class ConfigError(VlmpackError, ValueError):
    """Settings contradict each other, or the trainer is set up in a way that would corrupt packed rows."""


class RequestError(VlmpackError, ValueError):
    """A client of the step service sent an invalid request; the message names the datum, what was seen, the remedy."""


class UnpackedWarning(UserWarning):
    """A training step or an evaluation bypassed the packed forward.

    Padding is then computed, or batches are weighted equally. The message says why.
    """


class SkippedWarning(UserWarning):
    """Unusable samples were skipped while measuring, collating or planning.

    The message names the first ones, and says where all are listed or counted.
    """


@contextmanager
def skipped_are_reported() -> Iterator[None]:
    """Suppress `SkippedWarning` because the caller reports or raises refused samples itself."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SkippedWarning)
        yield


def check_kind(name: str, value: object, kind: type, such_as: str) -> None:
    """Check the type of the argument `name`; otherwise Python would raise an AttributeError far from the cause.

    Raises:
        ConfigError: the type is wrong. The message gives an example of a valid value.
    """
    if not isinstance(value, kind):
        raise ConfigError(f"{name} has to be a {kind.__name__}, such as {such_as}, got a {type(value).__name__}")


def check_choice(name: str, value: object, choices: Collection[str]) -> None:
    """Check that the argument `name` is one of `choices`.

    Raises:
        ConfigError: it is not. The message lists the choices.
    """
    if value not in choices:
        raise ConfigError(f"{name} must be one of {', '.join(choices)}, got {value!r}")


def check_whole_number(
    name: str,
    value: object,
    *,
    at_least: int = 1,
    at_most: int | None = None,
    remedy: str | None = None,
    error: type[VlmpackError] = ConfigError,
) -> int:
    """Return the argument `name` as an int; numpy integers are accepted, True and False are not.

    Args:
        name: name of the argument; the message begins with it.
        value: the number.
        at_least: smallest allowed value.
        at_most: largest allowed value; None: no limit.
        remedy: what to do, put at the end of the message; None: the limits are enough.
        error: type of error to raise.

    Raises:
        VlmpackError: `value` is not a whole number or is outside the limits. The type is `error`.
    """
    is_whole = isinstance(value, Integral) and not isinstance(value, bool)
    number = int(cast(SupportsInt, value)) if is_whole else at_least - 1
    if number < at_least or (at_most is not None and number > at_most):
        limits = f"of at least {at_least}" if at_most is None else f"from {at_least} to {at_most}"
        message = f"{name} must be a whole number {limits}, got {value!r:.80}"
        raise error(message if remedy is None else f"{message}; {remedy}")
    return number


def check_extra(extra: str, *packages: str, needed_by: str) -> None:
    """Check that the packages of an extra are installed, without importing them.

    Args:
        extra: the extra of vlmpack that installs them, such as "data".
        packages: import names.
        needed_by: what needs them; the message begins with it.

    Raises:
        ConfigError: some are missing. The message gives the command that installs them.
    """
    if missing := [package for package in packages if not _is_installed(package)]:
        raise ConfigError(
            f"{needed_by} needs {' and '.join(missing)}, not installed here: pip install 'vlmpack[{extra}]'"
        )


def _is_installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:  # the parent package is missing
        return False


def _rebuild_sample_error(fields: dict[str, Any]) -> SampleError:
    return SampleError(fields.pop("detail"), **fields)
