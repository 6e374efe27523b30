"""What a finished store has lost since: files that are gone, cut, or no longer what its manifest tells of."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from vlmpack.errors import ConfigError, LayoutError
from vlmpack.plan import LengthTable, Plan
from vlmpack.store.files import size_of
from vlmpack.store.manifest import LEFT_OUT, LENGTHS, PLAN, Manifest, Shard


def whole_shards(out: Path, manifest: Manifest) -> Mapping[str, Shard]:
    """The files of rows that nobody has removed or cut."""
    return {shard.file: shard for shard in manifest.shards if size_of(out / shard.file) == shard.bytes}


def lost_files(out: Path, manifest: Manifest) -> list[str]:
    """Names of files besides the rows that are gone or damaged."""
    checks = {LENGTHS: _is_whole_table, PLAN: _is_whole_plan, LEFT_OUT: _is_whole_list}
    return [name for name, is_whole in checks.items() if not is_whole(out / name, manifest)]


def _is_whole_table(path: Path, manifest: Manifest) -> bool:
    try:
        table = LengthTable.load(path)
    except (ConfigError, LayoutError):
        return False
    return (table.given, len(table.refused)) == (manifest.counts.given, manifest.counts.refused)


def _is_whole_plan(path: Path, manifest: Manifest) -> bool:
    try:
        return Plan.load(path).digest == manifest.plan
    except (ConfigError, LayoutError):
        return False


def _is_whole_list(path: Path, manifest: Manifest) -> bool:
    """A line for every sample that was left out, each with its reason."""
    try:
        *lines, rest = path.read_text(encoding="utf-8").split("\n")  # not `splitlines`: texts may hold U+2028
        return not rest and Counter(json.loads(line)["reason"] for line in lines) == Counter(manifest.reasons)
    except (OSError, ValueError, KeyError, TypeError):
        return False
