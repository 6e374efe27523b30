"""Rows of other libraries as samples: their columns renamed, their turns and pairs written as messages.

    Alpaca            {"instruction", "input", "output", "history"}         ─┐
    ms-swift          {"query", "response", "history"}                       ├─▶ {"messages": [...], ...}
                      {"conversation": [{"human", "assistant"}, ...]}        │
    captions          {"response"} or {"txt"}, beside an image              ─┘
    any other names   columns={"question": "query", "answer": "response"}   ───▶ one of the above, or of the collator's

`column_names.py` reads the names that users write.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

from vlmpack.data.readers import Rows, StoredRows
from vlmpack.data.tool_calls import CALLING, calls_in, read_tools
from vlmpack.errors import ConfigError, SampleError

SHAPES = (("query", "response"), ("instruction", "output"), ("response",), ("txt",))
"""Columns of a question and its answer, or of a text for an image, that are written as messages."""
CHAT = ("messages", "conversations", "conversation", "texts", "prompt", "completion", "input_ids")
_LOOKED_AT = 100
"""Rows in which a column that is to be renamed is looked for."""


@final
@dataclass(frozen=True, kw_only=True)
class TurnTags:
    """Keys and roles of the turns in a foreign `messages` column."""

    role: str = "from"
    """Key of a turn's role."""
    content: str = "value"
    """Key of its text."""
    roles: Mapping[str, str] = field(default_factory=dict)
    """Roles as the data set names them -> the roles of messages."""


@final
@dataclass(frozen=True, kw_only=True)
class ColumnMap:
    """Foreign columns as those that are read."""

    names: Mapping[str, str] = field(default_factory=dict)
    """Column of the data set -> the name that is read."""
    tags: TurnTags | None = None
    """Of the turns in `messages`; None: they have `role` and `content`, or `from` and `value`."""
    required: tuple[str, ...] = ()
    """Columns that have to be there."""
    folder: Path | None = None
    """Where paths of media start; None: where the source says."""

    def apply(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return the row with its columns renamed, and its turns or pairs as messages.

        Raises:
            ValueError: two columns have one name, or turns or pairs are none.
        """
        renamed: dict[str, Any] = {}
        if "chosen" in self.names:  # the answers that are learnt: the others are left out on purpose
            row = {name: value for name, value in row.items() if not name.startswith("rejected")}
        for name, value in row.items():
            target = self.names.get(name, name)
            if target in renamed and value is not None and renamed[target] is not None:
                raise ValueError(f"has two columns that would be read as {target!r}; leave {name!r} out, or rename it")
            if renamed.get(target) is None:
                renamed[target] = value
        if self.tags is not None and renamed.get("messages") is not None:
            renamed["messages"] = [_tagged(turn, self.tags) for turn in renamed["messages"]]
        return as_messages(renamed)


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class ForeignRows:
    """Rows of a source, each as a sample that the collator takes."""

    rows: Rows
    """Rows in the names that are stored."""
    columns: ColumnMap
    """Their names."""

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """One row.

        Raises:
            SampleError: it cannot be read, or not be written as messages.
        """
        return self._converted(self.rows[index], index)

    def batches(self) -> Iterator[dict[str, Any]]:
        """Yield all rows of a table in their order without their media; one that cannot be read is empty."""
        rows = self.rows
        assert isinstance(rows, StoredRows), "only tables are read by batches"
        media = {"image", "images", "video", "videos", "audio", "audios"}
        texts = [name for name in rows.columns if self.columns.names.get(name, name) not in media]
        for row in rows.only(texts, "").batches():
            try:
                yield self.columns.apply(row)
            except ValueError:
                yield {}

    def _converted(self, row: Mapping[str, Any], index: int) -> dict[str, Any]:
        try:
            return self.columns.apply(row)
        except ValueError as error:
            raise SampleError(f"its row {error}", index=index, reason="row_unreadable") from error


def with_columns(rows: Rows, name: str, columns: ColumnMap | None) -> Rows:
    """Return the rows with foreign columns read; those that have none are returned as they are.

    Raises:
        ConfigError: a column that is to be renamed is not there, or the first row cannot be read.
    """
    if columns is None:
        is_known = not len(rows) or not is_foreign(_first(rows, name))
        return rows if is_known else _readable(ForeignRows(rows=rows, columns=ColumnMap()), name)
    known = dict.fromkeys(rows.columns if isinstance(rows, StoredRows) else _names(rows))
    if absent := [column for column in columns.required if column not in known]:
        raise ConfigError(
            f"{name} has no column {' and '.join(map(repr, absent))}, which columns= reads as "
            f"{' and '.join(columns.names[column] for column in absent)}; it has {', '.join(map(str, known))}"
        )
    return _readable(ForeignRows(rows=rows, columns=columns), name)


def _readable(rows: ForeignRows, name: str) -> ForeignRows:
    if len(rows):
        _first(rows, name)
    return rows


def _first(rows: Rows, name: str) -> Mapping[str, Any]:
    """The first row: where that cannot be read, the names or the format are at fault more often than the row is."""
    try:
        return rows[0]
    except SampleError as error:
        raise ConfigError(f"the first sample of {name} cannot be read: {error.detail}") from error


def _names(rows: Rows) -> Iterator[str]:
    for index in range(min(len(rows), _LOOKED_AT)):
        try:
            yield from rows[index]
        except SampleError:  # it is refused when its turn comes
            continue


# ---------------------------------------------------------------------- rows as messages


def is_foreign(row: Mapping[str, Any]) -> bool:
    """Return whether a row is a question and an answer in columns of their own, or ms-swift's pairs."""
    present = {name for name, value in row.items() if value is not None}
    if _holds_pairs(row.get("conversation")):
        return True
    return not present & set(CHAT) and any(present.issuperset(shape) for shape in SHAPES)


def as_messages(row: dict[str, Any]) -> dict[str, Any]:
    """Write a question and its answer, those before them, or ms-swift's pairs as `messages`; another row is returned.

    Raises:
        ValueError: a text is none, or the history is no list of pairs.
    """
    if isinstance(row.get("tools"), str):
        row = {**row, "tools": read_tools(row["tools"])}
    if not is_foreign(row):
        return row
    if _holds_pairs(row.get("conversation")):
        rest = {name: value for name, value in row.items() if name != "conversation"}
        return {
            **rest,
            "messages": _turns([(pair.get("human"), pair.get("assistant")) for pair in row["conversation"]]),
        }
    shape = next(shape for shape in SHAPES if all(row.get(name) is not None for name in shape))
    rest = {name: value for name, value in row.items() if name not in (*shape, "input", "history")}
    answer = row[shape[-1]]
    if len(shape) == 1:
        return {**rest, "messages": [*_media_turn(rest), {"role": "assistant", "content": _text(answer, shape[-1])}]}
    question = _text(row[shape[0]], shape[0])
    if more := row.get("input"):
        question = f"{question}\n{_text(more, 'input')}" if question else _text(more, "input")
    history = row.get("history") or []
    if not isinstance(history, Sequence) or isinstance(history, str) or not all(map(_is_pair, history)):
        raise ValueError(f"has a history that is no list of [question, answer]: {history!r:.60}")
    return {**rest, "messages": _turns([*map(tuple, history), (question, answer)])}


def _turns(pairs: Sequence[tuple[Any, Any]]) -> list[dict[str, Any]]:
    roles = ("user", "assistant")
    return [{"role": r, "content": _text(text, r)} for pair in pairs for r, text in zip(roles, pair, strict=True)]


def _media_turn(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A user who shows the media of the row and says nothing; a row without any has no such turn."""
    parts = []
    for kind in ("image", "video", "audio"):
        media = next((row[name] for name in (kind, f"{kind}s") if row.get(name) is not None), [])
        is_list = isinstance(media, list | tuple) and not (media and isinstance(media[0], float))  # of one audio
        parts += [{"type": kind}] * (len(media) if is_list else 1)
    return [{"role": "user", "content": parts}] if parts else []


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"has no text for {name}, but {value!r:.60}; write a text, or leave the sample out")
    return value


def _holds_pairs(value: Any) -> bool:
    return isinstance(value, Sequence) and bool(value) and all(
        isinstance(pair, Mapping) and {"human", "assistant"} <= pair.keys() for pair in value
    )  # fmt: skip


def _is_pair(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str) and len(value) == 2


def _tagged(turn: Any, tags: TurnTags) -> dict[str, Any]:
    """A turn as a message; LLaMA-Factory's function calls are JSON in its text."""
    if not isinstance(turn, Mapping) or not {tags.role, tags.content} <= turn.keys():
        raise ValueError(f"has a turn without {tags.role!r} and {tags.content!r}: {turn!r:.60}; correct the tags")
    role = turn[tags.role]
    if tags.roles and role not in tags.roles:
        raise ValueError(f"has a turn of the role {role!r}, which the tags do not name ({', '.join(tags.roles)})")
    message = {key: value for key, value in turn.items() if key not in (tags.role, tags.content)}
    message |= {"role": tags.roles.get(role, role), "content": turn[tags.content]}
    if message["role"] not in CALLING:
        return message
    try:
        return {**message, "role": "assistant", "content": "", "tool_calls": calls_in(message["content"])}
    except ValueError as error:
        raise ValueError(f"has {error}") from error
