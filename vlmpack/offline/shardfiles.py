"""The files of a store, opened when a process first reads from them."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Collection
from pathlib import Path
from typing import Any, final

from vlmpack.errors import ConfigError
from vlmpack.offline.arrow import pyarrow

MOST_OPEN = 64
"""Files that are open at a time, of those used last: a store may have more than a process may open."""


@final
class ShardFiles:
    """Rows by file and number. Pickles as a path; after a fork, the child opens files of its own.

    Args:
        folder: of the store.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._open: OrderedDict[str, Any] = OrderedDict()
        self._process = os.getpid()

    def read(self, name: str, row: int, *, without: Collection[str] = ()) -> Any:
        """One row as a pyarrow table.

        Args:
            name: of the file.
            row: its number in the file.
            without: columns that are left where they are.

        Raises:
            ConfigError: the file is not there, or damaged.
        """
        try:
            file = self._file(name)
            columns = [column for column in file.schema_arrow.names if column not in without]
            return file.read_row_group(row, columns=columns, use_threads=False)
        except (OSError, pyarrow().ArrowException) as error:  # OSError: a page's checksum is wrong, too
            raise ConfigError(
                f"row {row} of {self.folder / name} cannot be read: {error}. The file is damaged: restore it, or "
                "remove it and pack again into the same folder, which writes this file alone"
            ) from error

    def _file(self, name: str) -> Any:
        if self._process != os.getpid():
            self._open, self._process = OrderedDict(), os.getpid()
        if name not in self._open:
            self._open[name] = pyarrow().parquet.ParquetFile(self.folder / name, page_checksum_verification=True)
            if len(self._open) > MOST_OPEN:
                self._open.popitem(last=False)[1].close()
        self._open.move_to_end(name)
        return self._open[name]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": OrderedDict()}
