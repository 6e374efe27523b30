"""Every error vlmpack raises on purpose.

VlmpackError
├── SampleError    one sample cannot be used: which one, what was seen, what to do
├── LayoutError    a batch or row contradicts itself: masks, lengths, boundaries
├── BackendError   no attention back-end can serve this call, with each one's reasons
├── FamilyError    this model (or processor) is of a family that is not supported, and why
└── ConfigError    settings that contradict each other or the surrounding trainer

UnpackedWarning, a UserWarning: a training step of an enabled model computes its padding, and why.

SampleError and ConfigError are a ValueError too, which scripts catch where a data set or an argument is refused.
"""

from __future__ import annotations

from typing import final


class VlmpackError(Exception):
    """The root: `except VlmpackError` catches whatever vlmpack refuses."""


class SampleError(VlmpackError, ValueError):
    """One sample cannot be used.

    Args:
        message: what was seen and what to do about it, without the sample's name.
        index: position of the sample in the list given to the collator. None: `message` names the sample already,
            as when torch builds the error of a DataLoader worker again from its text.
        sample_id: the sample's own id where it has one.
        reason: a short slug such as ``"image_token_mismatch"``: the key under which the ledger counts it.
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


class UnpackedWarning(UserWarning):
    """A training step went past the packed forward, so that padding is computed; the message says why."""


def check_kind(name: str, value: object, kind: type, such_as: str) -> None:
    """Raise unless the argument `name` is of its type; Python itself would only miss an attribute, far from here.

    Raises:
        ConfigError: it is not; says what would be.
    """
    if not isinstance(value, kind):
        raise ConfigError(f"{name} has to be a {kind.__name__}, such as {such_as}, got a {type(value).__name__}")


def _rebuild_sample_error(message: str, index: int | None, reason: str, sample_id: str | int | None) -> SampleError:
    return SampleError(message, index=index, reason=reason, sample_id=sample_id)


@final
class Refusal(Exception):  # noqa: N818 (never leaves the room: the collator turns it into a SampleError)
    """A sample cannot be used. The collator adds its index and id, and counts it under `reason`.

    Args:
        reason: a short slug, listed in the room's README.
        message: what was seen and what to do about it.
        of_all: whether it is likely true of all samples, and so a mistake of the setup.
    """

    def __init__(self, reason: str, message: str, *, of_all: bool = False) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.of_all = of_all
