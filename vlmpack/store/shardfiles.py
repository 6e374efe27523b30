"""The files of a store, opened when a process first reads from them, and compared with what the manifest says of them.

when opened    the footer's SHA-256, so that it is the file that was written, and no other one of the same size
when read      the checksum of each row that is read, which the footer holds
"""

from __future__ import annotations

import hashlib
import os
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, final

from vlmpack.errors import ConfigError
from vlmpack.store.arrow import pyarrow
from vlmpack.store.files import unreadable
from vlmpack.store.manifest import NAME, Shard
from vlmpack.store.record import CHECKSUMS, MEDIA, media_checksum, row_checksum

MOST_OPEN = 64
"""Files that are open at a time, of those used last: a store may have more than a process may open."""


TAIL = 8
"""Bytes behind a footer: its length in 4 bytes, and b"PAR1"."""


@final
class ShardFiles:
    """Rows by file and number. Pickles as a path; after a fork, the child opens files of its own.

    Args:
        folder: of the store.
        shards: its files.
    """

    def __init__(self, folder: Path, shards: Iterable[Shard]) -> None:
        self.folder = folder
        self._shards = {shard.file: shard for shard in shards}
        self._open: OrderedDict[str, Any] = OrderedDict()
        self._process = os.getpid()

    def read(self, name: str, row: int, *, without: Collection[str] = ()) -> Any:
        """One row as a pyarrow table.

        Args:
            name: of the file.
            row: its number in the file.
            without: columns of media that are left where they are.

        Raises:
            ConfigError: the file is not there, damaged, or another one than was written.
        """
        with self._named(f"row {row} of {self.folder / name}"):
            file = self._file(name)
            columns = [column for column in file.schema_arrow.names if column not in without]
            table = file.read_row_group(row, columns=columns, use_threads=False)
            checksum = file.metadata.metadata[CHECKSUMS.encode()].decode().split(" ")[row]
            seen = checksums(table)
            if len(table) != 1 or not checksum.startswith(seen) or (len(seen) < len(checksum) and not without):
                raise ValueError("its checksum is another one")
        return table

    def digests(self, name: str) -> Sequence[tuple[int, str]]:
        """(place in the data set, digest) of every sample of a file; raises as `read`."""
        found = []
        for row in range(self._shards[name].rows):
            table = self.read(name, row, without=MEDIA)
            found += zip(table["places"][0].as_py(), table["digests"][0].as_py(), strict=True)
        return found

    def _file(self, name: str) -> Any:
        if self._process != os.getpid():
            self._open, self._process = OrderedDict(), os.getpid()
        if name not in self._open:
            shard = self._shards[name]
            if footer_digest(self.folder / name) != shard.footer:
                raise ValueError(f"its footer is not the one that {NAME} says")
            self._open[name] = pyarrow().parquet.ParquetFile(self.folder / name, page_checksum_verification=True)
            if len(self._open) > MOST_OPEN:
                self._open.popitem(last=False)[1].close()
        self._open.move_to_end(name)
        return self._open[name]

    @contextmanager
    def _named(self, what: str) -> Iterator[None]:
        """Whatever reading a damaged file raises as one refusal; one without the right to read it as another."""
        try:
            yield
        except (FileNotFoundError, PermissionError) as error:
            raise unreadable(what, error) from error
        except (ConfigError, MemoryError):
            raise
        except Exception as error:  # on damaged bytes pyarrow raises errors of every kind; OSError: a page's checksum
            raise ConfigError(
                f"{what} cannot be read: {error}. The file is damaged: restore it, or remove it and pack again into "
                "the same folder, which writes this file alone"
            ) from error

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": OrderedDict()}


def checksums(table: Any) -> str:
    """Of one row: of its columns, then of its media where they were read."""
    has_media = all(name in table.column_names for name in MEDIA)
    return row_checksum(table) + (media_checksum(table) if has_media else "")


def footer_digest(path: Path) -> str:
    """SHA-256 of the footer of a parquet file, its length included.

    Raises:
        ValueError: it has none.
    """
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(size - TAIL, 0))
        tail = file.read(TAIL)
        length = int.from_bytes(tail[:4], "little") + TAIL
        if len(tail) < TAIL or length > size:
            raise ValueError("it ends without a footer")
        file.seek(size - length)
        return hashlib.sha256(file.read(length)).hexdigest()
