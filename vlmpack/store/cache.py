"""LengthCache: what was measured before, in one SQLite file that several processes may use at a time.

    content.py: settings + sample ──▶ 16 bytes ──▶ Entry: its lengths, or why it was refused

Nothing in it can go stale: what was measured under other settings, or of other content, has another key. Damage is
told as such and never repaired, as the file might be somebody else's; it can be deleted at any time. SQLite would miss
most of it: each entry has a checksum of its own.
"""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, final

from vlmpack.errors import ConfigError

APPLICATION = int.from_bytes(b"vlmp", "big")
"""SQLite's `application_id` of these files."""
VERSION = 2
"""SQLite's `user_version` of these files."""
PATIENCE = 60.0
"""Seconds to wait for another process that is writing."""


class Entry(NamedTuple):
    """What is known of one sample: a row of a `LengthTable`, or a refusal."""

    text_tokens: int = 0
    image_tokens: int = 0
    video_tokens: int = 0
    images: int = 0
    videos: int = 0
    patches: int = 0
    targets: int = 0
    reason: str | None = None
    """The slug of its refusal; None: it can be used."""
    detail: str | None = None
    """What was seen, and what to do."""


_COLUMNS = ", ".join(Entry._fields)
_MARKS = ", ".join("?" * (2 + len(Entry._fields)))
_TABLE = f"CREATE TABLE IF NOT EXISTS lengths (key BLOB PRIMARY KEY, {_COLUMNS}, checksum BLOB) WITHOUT ROWID"


@final
class LengthCache:
    """Entries by key. Connections are opened when they are needed, by each process for itself, and closed by `close` or
    at the end of a `with` block.

    Args:
        path: the file, made with its folders if it is not there.

    Raises:
        ConfigError: the file is damaged, of another version, no such file at all, or cannot be written.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._connection: sqlite3.Connection | None = None
        try:
            with self._errors():
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._create()
        finally:
            self.close()  # a fork must not inherit an open one

    def get(self, keys: Sequence[bytes]) -> dict[bytes, Entry]:
        """The entries that are there, by key."""
        if not keys:
            return {}
        with self._errors():
            marks = ", ".join("?" * len(keys))
            found = f"SELECT key, {_COLUMNS}, checksum FROM lengths WHERE key IN ({marks})"
            rows = self._open().execute(found, keys).fetchall()
            return {key: _checked(key, values, checksum) for key, *values, checksum in rows}

    def put(self, entries: Mapping[bytes, Entry]) -> None:
        """Write entries, all or none of them; a process that is killed meanwhile leaves the file as it was."""
        if not entries:
            return
        with self._errors():
            connection = self._open()
            connection.execute("BEGIN IMMEDIATE")
            with connection:  # commits, or rolls back
                rows = ((key, *entry, _checksum(key, entry)) for key, entry in entries.items())
                connection.executemany(f"INSERT OR REPLACE INTO lengths VALUES ({_MARKS})", rows)

    def __enter__(self) -> LengthCache:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close this process's connection; the next use opens another one."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def __len__(self) -> int:
        with self._errors():
            return self._open().execute("SELECT COUNT(*) FROM lengths").fetchone()[0]

    def __getstate__(self) -> dict[str, Path | None]:
        return {"path": self.path, "_connection": None}

    # ------------------------------------------------------------------ the file

    def _open(self) -> sqlite3.Connection:
        if self._connection is None:
            self._connection = sqlite3.connect(self.path, timeout=PATIENCE, isolation_level=None)
        return self._connection

    def _create(self) -> None:
        """Make the table in an empty file; look at whose file it is otherwise."""
        connection = self._open()
        connection.execute("BEGIN IMMEDIATE")
        with connection:
            application, version = (connection.execute(f"PRAGMA {name}").fetchone()[0] for name in _MARKERS)
            is_empty = connection.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()[0] == 0
            if is_empty and (application, version) == (0, 0):
                connection.execute(f"PRAGMA application_id = {APPLICATION}")
                connection.execute(f"PRAGMA user_version = {VERSION}")
                connection.execute(_TABLE)
            elif (application, version) != (APPLICATION, VERSION):
                raise ConfigError(
                    f"{self.path} is no cache of lengths of version {VERSION}: its application and version are "
                    f"{application} and {version}. Name another file; if it is an old cache, delete it"
                )

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """SQLite's errors as ours, with the file's name."""
        try:
            yield
        except ConfigError:
            raise
        except sqlite3.OperationalError as error:  # locked, read-only, disk full, no such folder
            self.close()
            raise self._unusable(error) from error
        except OSError as error:
            raise self._unusable(error) from error
        except (sqlite3.DatabaseError, ValueError, TypeError) as error:  # TypeError: a key that is none
            self.close()
            raise ConfigError(
                f"{self.path} is damaged, or no cache of lengths ({error}); delete it, if it is one: it will be made "
                "again"
            ) from error

    def _unusable(self, error: Exception) -> ConfigError:
        return ConfigError(
            f"the cache of lengths {self.path} cannot be used: {error}; see to its folder (rights, room, locks), or "
            "name another file"
        )


_MARKERS = ("application_id", "user_version")


def _checked(key: bytes, values: Sequence[object], checksum: object) -> Entry:
    """The entry that was written; a ValueError where damage has made something else of it."""
    if checksum != _checksum(key, values):
        raise ValueError(f"an entry holds {values}, and its checksum is another one")
    return Entry(*values)  # pyright: ignore[reportArgumentType]


def _checksum(key: bytes, values: Sequence[object]) -> bytes:
    return hashlib.blake2b(repr(tuple(values)).encode(errors="surrogatepass"), digest_size=8, key=key).digest()
