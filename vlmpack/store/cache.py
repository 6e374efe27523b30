"""LengthCache: lengths that were measured before, in one SQLite file that several processes may use at a time.

    settings + sample ──▶ key of 16 bytes ──▶ Entry: its lengths, or why it was refused

    settings   collator, processor, tokenizer, chat template, versions of what renders and tokenises
    text       messages as the chat template gets them, or prompt and completion as they stand
    media      height and width of the header, and the keys beside them that choose another size; where shared
               prefixes are looked for, sums of their bytes too

Otherwise only image sizes enter the key. So an image that is encoded again in its old size is found again, wherever
it lies, and an image of another size is never taken for it, whatever its file's name and date.

No entry can go stale: what was measured under other settings, or of other content, has another key. Damage is refused
and never repaired, as the file might hold other data; the file can be deleted at any time. SQLite would miss most
damage, so each entry has a checksum.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple, final

import numpy as np

from vlmpack.collate.collator import VLMCollator
from vlmpack.collate.conversation import read_conversation
from vlmpack.collate.processor_metadata import AUDIO_FIELDS, TEMPLATE_FIELDS, parts_of
from vlmpack.data.images import ImageError, read_size
from vlmpack.data.processor import settings_of
from vlmpack.errors import ConfigError, Refusal
from vlmpack.store.symbols import content_sums

APPLICATION = int.from_bytes(b"vlmp", "big")
"""SQLite's `application_id` of these files."""
VERSION = 3
"""SQLite's `user_version` of these files."""
BUSY_SECONDS = 60.0
"""Time for which another process may be writing before an access fails."""
RULES = 3
"""To be raised with every change that gives the same sample other lengths."""
KEY_BYTES = 16


class Entry(NamedTuple):
    """The lengths of one sample, a row of a `LengthTable`, or a refusal."""

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
    """The fault, and the remedy."""
    marks: bytes | None = None
    """Of `PrefixMarks.to_bytes`; None: shared prefixes are not looked for."""


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
        """Read the entries that are there, by key."""
        if not keys:
            return {}
        with self._errors():
            marks = ", ".join("?" * len(keys))
            query = f"SELECT key, {_COLUMNS}, checksum FROM lengths WHERE key IN ({marks})"
            rows = self._open().execute(query, keys).fetchall()
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
            self._connection = sqlite3.connect(self.path, timeout=BUSY_SECONDS, isolation_level=None)
        return self._connection

    def _create(self) -> None:
        """Make the table in an empty file; refuse a file that is no cache of this version."""
        connection = self._open()
        connection.execute("BEGIN IMMEDIATE")
        with connection:
            application, version = (
                connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("application_id", "user_version")
            )
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
        """Raise SQLite's errors as a ConfigError that names the file."""
        try:
            yield
        except ConfigError:
            raise
        except (sqlite3.OperationalError, OSError) as error:  # locked, read-only, disk full, no such folder
            self.close()
            raise ConfigError(
                f"the cache of lengths {self.path} cannot be used: {error}; see to its folder (rights, room, locks), "
                "or name another file"
            ) from error
        except (sqlite3.DatabaseError, ValueError, TypeError) as error:  # TypeError: a key that is none
            self.close()
            raise ConfigError(
                f"{self.path} is damaged, or no cache of lengths ({error}); delete it, if it is one: it will be made "
                "again"
            ) from error


def _checked(key: bytes, values: Sequence[object], checksum: object) -> Entry:
    """Check an entry against its checksum; raises a ValueError where damage has changed it."""
    if checksum != _checksum(key, values):
        raise ValueError(f"an entry holds {values}, and its checksum is another one")
    return Entry(*values)  # pyright: ignore[reportArgumentType]


def _checksum(key: bytes, values: Sequence[object]) -> bytes:
    return hashlib.blake2b(repr(tuple(values)).encode(errors="surrogatepass"), digest_size=8, key=key).digest()


# ---------------------------------------------------------------------- keys


def settings_key(collator: VLMCollator, *, estimate: bool = False, has_marks: bool = False) -> bytes:
    """Compute the digest of everything besides the samples that decides lengths, and marks if entries have them."""
    parts = parts_of(collator.processor)
    metadata = {**asdict(collator.metadata), "newline_ids": sorted(collator.metadata.newline_ids)}
    if not collator.metadata.has_audio:
        metadata = {name: value for name, value in metadata.items() if name not in AUDIO_FIELDS}
    if collator.metadata.by_processor:
        metadata["settings"] = settings_of(collator.processor) if collator.metadata.has_vision else None
    else:
        metadata = {name: value for name, value in metadata.items() if name not in TEMPLATE_FIELDS}
    return _digest(
        {
            "versions": [RULES, version("transformers"), version("tokenizers")],
            "processor": type(collator.processor).__name__,
            "chat_template": collator.processor.chat_template,
            "special_tokens": {name: str(token) for name, token in parts.tokenizer.special_tokens_map.items()},
            "tokenizer": _tokenizer(parts.tokenizer),
            "image_processor": None if parts.image_processor is None else parts.image_processor.to_dict(),
            "metadata": metadata,
            "limits": asdict(collator.limits),
            "video_files": asdict(collator.file_rules),
            "collator": [collator.train_on, collator.max_length, collator.overlength, collator.markers],
            "messages": [collator.add_stop, collator.ignored_keys],
            "estimate": estimate,
            **({"marks": 1} if has_marks else {}),
        },
        default=str,
    )


def sample_key(feature: Any, settings: bytes, collator: VLMCollator, *, has_marks: bool = False) -> bytes | None:
    """Compute the key of one sample under settings; to a model that has no vision `<image>` in a text is text.

    Args:
        feature: the sample.
        settings: of `settings_key`.
        collator: reads the sample.
        has_marks: the content of media enters the key, not only their sizes.

    Returns:
        16 bytes. None: the sample is not worth a key, as it was tokenised before; or it has none, as an image cannot
        be read, its columns contradict each other, or it holds what JSON cannot.
    """
    try:
        content = content_of(feature, collator, partial(read_size, limits=collator.limits), _no_key)
        if has_marks:
            content += content_of(feature, collator, partial(content_sums, limits=collator.limits), _no_key)[-2:]
        return _digest(content, key=settings, default=plain)
    except (Refusal, ImageError, TypeError, ValueError, RecursionError):
        return None


def content_of(
    feature: Any, collator: VLMCollator, read: Callable[[Any], Any], read_file: Callable[[Any], Any]
) -> list[Any]:
    """List what the collator reads of a sample, with the result of `read` for each image and frame, and of `read_file`
    for each file of a video.

    Raises:
        TypeError: it is no conversation, or was tokenised before.
        Refusal: its columns contradict each other.
    """
    if not isinstance(feature, Mapping) or feature.get("input_ids") is not None:
        raise TypeError("no conversation")
    metadata = collator.metadata
    row = read_conversation(
        feature,
        has_vision=metadata.has_vision,
        has_audio=metadata.has_audio,
        markers=collator.markers,
        ignored_keys=collator.ignored_keys,
    )
    if row.audios:
        raise TypeError("audio is measured each time: counting it takes its length alone")
    images = [[read(ref.source), ref.options] for ref in row.images]
    videos = [[_frames(ref.source, read, read_file), ref.options] for ref in row.videos]
    return [row.messages, row.plain, row.trained_turns, row.template_options, images, videos]


def _frames(video: Any, read: Callable[[Any], Any], read_file: Callable[[Any], Any]) -> Any:
    return [read(frame) for frame in video] if isinstance(video, list | tuple) else read_file(video)


def _no_key(video: Any) -> Any:
    raise TypeError("the header of a file of a video is measured each time: reading it is all that measuring takes")


def _tokenizer(tokenizer: Any) -> Any:
    """Describe a tokenizer by everything except what its last call left behind."""
    if not tokenizer.is_fast:
        return [tokenizer.get_vocab(), tokenizer.init_kwargs]
    return {**json.loads(tokenizer.backend_tokenizer.to_str()), "truncation": None, "padding": None}


def _digest(content: Any, *, default: Any, key: bytes = b"") -> bytes:
    """Hash JSON whose keys are not sorted: a template may write a mapping in the order it has."""
    text = json.dumps(content, default=default, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=KEY_BYTES, key=key).digest()


def plain(value: Any) -> Any:
    """Convert what data sets hold besides JSON's types."""
    if isinstance(value, np.generic | np.ndarray):
        return [str(value.dtype), value.tolist()]
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"a {type(value).__name__} has no place in a key")
