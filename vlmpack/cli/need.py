"""Optional packages: missing ones are named together with the extra that brings them."""

from __future__ import annotations

import importlib.util

from vlmpack.errors import ConfigError


def need(verb: str, *packages: str, extra: str) -> None:
    """Refuse to start a verb without its packages.

    Raises:
        ConfigError: some are not installed, with the command that installs them.
    """
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if missing:
        raise ConfigError(
            f"`vlmpack {verb}` needs {' and '.join(missing)}, not installed here: pip install 'vlmpack[{extra}]'"
        )
