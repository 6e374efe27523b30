"""The folder that a verb writes into, made before anything is computed for it."""

from __future__ import annotations

from pathlib import Path

from vlmpack.errors import ConfigError


def made_folder(option: str, folder: Path) -> Path:
    """Make the folder where there is none.

    Args:
        option: that names it, for the error.
        folder: to be written into.

    Raises:
        ConfigError: there is a file of that name, or in its way, or nothing may be written there.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        message = f"{option} {folder} cannot be a folder ({error.strerror}); name one that is there or can be made"
        raise ConfigError(message) from error
    return folder
