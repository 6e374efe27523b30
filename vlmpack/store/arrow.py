"""pyarrow, brought in when it is needed and asked for by its extra."""

from __future__ import annotations

from typing import Any

from vlmpack.errors import ConfigError


def pyarrow() -> Any:
    """The package, its parquet part loaded.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ConfigError("stored rows are parquet files, which need pyarrow: pip install 'vlmpack[data]'") from error
    return pyarrow
