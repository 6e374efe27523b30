"""Every error vlmpack raises on purpose, and the argument checks that several packages need.

VlmpackError
├── SampleError    one sample cannot be used: which one, what was seen, what to do
├── LayoutError    a batch or row contradicts itself: masks, lengths, boundaries
├── BackendError   no attention back-end can serve this call, with each one's reasons
├── FamilyError    this model (or processor) is of a family that is not supported, and why
├── ConfigError    settings that contradict each other or the surrounding trainer
└── RequestError   a client of the step service asked for what cannot be done

UnpackedWarning, a UserWarning: a training step of an enabled model computes its padding, and why; or an evaluation of
PackedTrainer is not packed.
SkippedWarning, a UserWarning: samples that cannot be used are left out, and where they are listed.

SampleError and ConfigError are a ValueError too, which scripts catch where a data set or an argument is refused.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from numbers import Integral
from typing import SupportsInt, cast, final


class VlmpackError(Exception):
    """The root: `except VlmpackError` catches whatever vlmpack refuses."""


class SampleError(VlmpackError, ValueError):
    """One sample cannot be used.

    Args:
        message: what was seen and what to do about it, without the sample's name.
        index: position of the sample in the list given to the collator. None: `message` names the sample already,
            as when torch builds the error of a DataLoader worker again from its text.
        sample_id: the sample's own id where it has one.
        reason: a short slug such as ``"image_token_mismatch"``: the key under which it is counted.
    """

    def __init__(
        self, message: str, *, index: int | None = None, reason: str = "unknown", sample_id: str | int | None = None
    ) -> None:
        self.index = index
        self.reason = reason
        self.sample_id = sample_id
        self.detail = message
        if index is not None:
            message = f"sample {index}{'' if sample_id is None else f' (id {sample_id!r})'}: {message}"
        super().__init__(message)

    def __reduce__(self) -> tuple:
        """Pickle by parts: the text alone would be taken for the whole message."""
        return _rebuild_sample_error, (self.detail, self.index, self.reason, self.sample_id)


class LayoutError(VlmpackError):
    """A batch or a row contradicts itself; the message names the row, what was seen and the remedy."""


class BackendError(VlmpackError):
    """No attention back-end can serve the call; the message lists each one's reasons."""


class FamilyError(VlmpackError):
    """The model or processor belongs to a family that vlmpack cannot pack exactly; the message says what leaks."""


class ConfigError(VlmpackError, ValueError):
    """Settings that contradict each other, or a trainer set up in a way that would corrupt packed rows."""


class RequestError(VlmpackError, ValueError):
    """A client of the step service sent what cannot be done; the message names the datum, what was seen, the remedy."""


class UnpackedWarning(UserWarning):
    """A training step or an evaluation went past the packed forward: padding is computed, or batches weigh alike; the
    message says why."""


class SkippedWarning(UserWarning):
    """Samples that cannot be used are left out of what was measured, collated or planned; the message names the first
    ones, and where all are listed or counted."""


@contextmanager
def skipped_are_reported() -> Iterator[None]:
    """Suppress `SkippedWarning` where the caller reports or raises refused samples itself."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SkippedWarning)
        yield


def check_kind(name: str, value: object, kind: type, such_as: str) -> None:
    """Raise unless the argument `name` is of its type; Python itself would only miss an attribute, far from here.

    Raises:
        ConfigError: it is not; says what would be.
    """
    if not isinstance(value, kind):
        raise ConfigError(f"{name} has to be a {kind.__name__}, such as {such_as}, got a {type(value).__name__}")


def check_choice(name: str, value: object, choices: Collection[str]) -> None:
    """Raise unless the argument `name` is one of a few words.

    Raises:
        ConfigError: it is not; lists them.
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
    """Return the argument `name` as an int, numpy's numbers included and True and False not.

    Args:
        name: of the argument, as the message begins.
        value: the number.
        at_least: the smallest that is allowed.
        at_most: the largest that is allowed; None: any.
        remedy: what to do, at the end of the message; None: the limits say it.
        error: what is raised.

    Raises:
        VlmpackError: it is no whole number, or lies outside the limits; of the kind `error`.
    """
    is_whole = isinstance(value, Integral) and not isinstance(value, bool)
    number = int(cast(SupportsInt, value)) if is_whole else at_least - 1
    if number < at_least or (at_most is not None and number > at_most):
        limits = f"of at least {at_least}" if at_most is None else f"from {at_least} to {at_most}"
        message = f"{name} must be a whole number {limits}, got {value!r:.80}"
        raise error(message if remedy is None else f"{message}; {remedy}")
    return number


def check_extra(extra: str, *packages: str, needed_by: str) -> None:
    """Raise unless packages that an extra of vlmpack brings are installed; none of them is imported.

    Args:
        extra: the extra, such as "data".
        packages: their names as they are imported.
        needed_by: what needs them, as the message begins.

    Raises:
        ConfigError: some are missing, with the command that installs them.
    """
    if missing := [package for package in packages if not _is_installed(package)]:
        raise ConfigError(
            f"{needed_by} needs {' and '.join(missing)}, not installed here: pip install 'vlmpack[{extra}]'"
        )


def _is_installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:  # the package that it would be a part of
        return False


def _rebuild_sample_error(message: str, index: int | None, reason: str, sample_id: str | int | None) -> SampleError:
    return SampleError(message, index=index, reason=reason, sample_id=sample_id)


@final
class Refusal(Exception):  # noqa: N818 (never leaves the package: the collator turns it into a SampleError)
    """A sample cannot be used. The collator adds its index and id, and counts it under `reason`.

    Args:
        reason: a short slug, listed in docs/troubleshooting.md.
        message: what was seen and what to do about it.
        of_all: whether it is likely true of all samples, and so a mistake of the setup.
    """

    def __init__(self, reason: str, message: str, *, of_all: bool = False) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.of_all = of_all
