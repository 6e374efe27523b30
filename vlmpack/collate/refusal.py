"""What the files of this room raise about one sample before it is known which one it is."""

from __future__ import annotations

from typing import final


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
