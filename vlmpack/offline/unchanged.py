"""A store against the data set that it is made of: every sample that lies in it must be there still, unchanged.

    shard       places [17, 4]   digests [a3.., 09..]    written with the row
    data set    [17] [4]         digests [a3.., 77..]    computed now: sample 4 was changed

A digest covers what the collator reads of a sample: text, options, its own id, and the bytes of its media, wherever
they lie and whenever they were written. Without it, samples of two data sets that are equally long would share a store.
"""

from __future__ import annotations

import hashlib
import json
import math
import zlib
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from PIL import Image

from vlmpack.collate import VLMCollator, read_conversation, sample_id_of
from vlmpack.data import (
    ImageError,
    ImageLimits,
    load_image,
    read_encoded,
)
from vlmpack.errors import ConfigError, Refusal
from vlmpack.loading import MapStyle, digest_of, sample_at
from vlmpack.offline.content import plain
from vlmpack.offline.manifest import LEFT_OUT, Shard
from vlmpack.offline.shardfiles import ShardFiles

DIGEST_BYTES = 16
PART = 256
"""Samples of the list of those left out that are compared at a time."""
NAMED = 5
"""Changed samples that a refusal lists."""


def sample_digest(sample: Any, collator: VLMCollator) -> str:
    """Compute the digest of what a sample holds, read whole: 32 hexadecimal digits.

    Equal for equal content: a file, its bytes and a data URI of them count alike. Columns that the collator does not
    read are left out, unless the sample cannot be read as a conversation.

    Args:
        sample: as the collator takes it, or the SampleError that a data set raised in its place.
        collator: its limits hold for images.
    """
    try:
        return hashlib.blake2b(_conversation(sample, collator), digest_size=DIGEST_BYTES).hexdigest()
    except (Refusal, ConfigError, TypeError, ValueError, RecursionError):  # bad, or tokenised before
        return digest_of(sample)


def _conversation(sample: Any, collator: VLMCollator) -> bytes:
    if not isinstance(sample, Mapping) or sample.get("input_ids") is not None:
        raise TypeError("no conversation")
    row = read_conversation(sample, has_vision=collator.metadata.has_vision)
    text = [sample_id_of(sample), row.messages, row.plain, row.trained_turns, row.template_options]
    media = [[_medium(ref.source, collator.limits), ref.options] for ref in (*row.images, *row.videos)]
    return json.dumps([*text, len(row.images), media], default=plain, separators=(",", ":")).encode()


def _medium(source: Any, limits: ImageLimits) -> Any:
    """Of an image, or of each frame of a video."""
    if isinstance(source, list | tuple):
        return [_medium(frame, limits) for frame in source]
    try:
        if not isinstance(source, Image.Image):
            return _sums(read_encoded(source, limits=limits))
        image = load_image(source, limits=limits)
        return [image.size, *_sums(image.tobytes())]
    except ImageError as error:
        return error.reason


def _sums(data: bytes) -> list[int]:
    """Length, CRC-32 and Adler-32: a third of the time of SHA-256, and enough against accidents."""
    return [len(data), zlib.crc32(data), zlib.adler32(data)]


# ---------------------------------------------------------------------- a whole store


InOrder = Callable[[Callable[[int], Any], int], Generator[Any]]
"""(work, parts) to the results of `work(0)`, `work(1)`, ... wherever they are made."""


def check_unchanged(
    dataset: MapStyle,
    collator: VLMCollator,
    out: Path,
    shards: Sequence[Shard],
    in_order: InOrder,
    told: Callable[[int, int], None],
) -> None:
    """Compare what a store holds, or lists as left out, with the data set.

    Args:
        dataset: samples by place; those of the store are read, and their media whole.
        collator: of the store.
        out: its folder.
        shards: the files that are finished.
        in_order: computes the parts.
        told: is called with (parts done, parts in all).

    Raises:
        ConfigError: a sample was changed; lists places. A file is damaged.
    """
    work = Comparison(dataset=dataset, collator=collator, out=out, shards=tuple(shards), listed=_listed(out))
    with closing(in_order(work, work.parts)) as parts:
        for done, changed in enumerate(parts, 1):
            if changed:
                named = ", ".join(map(str, sorted(changed)[:NAMED]))
                raise ConfigError(
                    f"{out} holds other samples than the data set given: {len(changed)} of {work.size(done - 1)} "
                    f"compared were changed since they were packed (at {named}{', ...' * (len(changed) > NAMED)}). "
                    "Pack into another folder, or remove this one"
                )
            told(done, work.parts)


@final
@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Compares a file of rows, or some of the samples left out, at a time; pickles to workers."""

    dataset: MapStyle
    collator: VLMCollator
    out: Path
    shards: tuple[Shard, ...]
    listed: tuple[tuple[int, str], ...]
    """(place, digest) of samples in no row."""

    @property
    def parts(self) -> int:
        """Files, and parts of the list."""
        return len(self.shards) + math.ceil(len(self.listed) / PART)

    def size(self, part: int) -> int:
        """Samples of a part."""
        return len(self._stored(part))

    def __call__(self, part: int) -> list[int]:
        """Compare one part; the places of samples that differ."""
        return [place for place, digest in self._stored(part) if self._digest(place) != digest]

    def _digest(self, place: int) -> str | None:
        """None: there is no such place."""
        within = 0 <= place < len(self.dataset)
        return sample_digest(sample_at(self.dataset, place), self.collator) if within else None

    def _stored(self, part: int) -> Sequence[tuple[int, str]]:
        if part < len(self.shards):
            return ShardFiles(self.out, self.shards).digests(self.shards[part].file)
        start = (part - len(self.shards)) * PART
        return self.listed[start : start + PART]


def _listed(out: Path) -> tuple[tuple[int, str], ...]:
    """(place, digest) of the samples that a list of those left out names; none without a list."""
    path = out / LEFT_OUT
    try:
        lines = path.read_text(encoding="utf-8").split("\n")[:-1] if path.is_file() else []
        return tuple((int(one["index"]), str(one["digest"])) for one in map(json.loads, lines))
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(f"{path} is damaged ({error!r}); remove it and pack again into the same folder") from error
