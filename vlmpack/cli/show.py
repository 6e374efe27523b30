"""`vlmpack show`: draw packed rows as ribbons of characters.

        0 aaaaAAAAAAAAAAaabbbbbbbcccCCC      a, b, c: the samples, one letter each, again from a after z
      928 CCCCCCCCCcc....                    capitals: tokens of images and videos;  dots: padding

Colours only repeat what the letters say.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, final

import typer
from rich.columns import Columns
from rich.console import Console, Group
from rich.text import Text

from vlmpack.cli import options
from vlmpack.cli.inputs import SYNTHETIC, InputOptions, check_finished, measure, open_inputs
from vlmpack.cli.mixing import MixOptions
from vlmpack.cli.tree_drawing import TreeDrawing, letter, style
from vlmpack.errors import ConfigError, LayoutError

if TYPE_CHECKING:
    import numpy as np

    from vlmpack.collate.encoded import Encoded
    from vlmpack.layout.prefix_tree import PrefixTree
    from vlmpack.layout.segments import Segments, SlotRule

LINES = 8
"""Most lines of a row, unless the tokens of a cell are given."""
PADDING = -1


def show(
    context: typer.Context,
    source: Annotated[str, typer.Argument(help="A data set, as for analyze; or a folder written by `vlmpack pack`.")],
    row: Annotated[
        list[int] | None, typer.Option(help="Which row, once or more; -1 is the last one; by default the first.")
    ] = None,
    processor: Annotated[str | None, typer.Option(help=f"{options.PROCESSOR_HELP} A data set needs one.")] = None,
    capacity: Annotated[int, typer.Option(min=1, help="Tokens of a row; of a packed folder its own.")] = 12_000,
    tokens_per_cell: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a character; by default as few as eight lines allow.")
    ] = None,
    split: options.Split = "train",
    num: options.Num = None,
    image_root: options.ImageRoot = None,
    branches: options.Branches = "conversation",
    columns: options.Columns = None,
    mix: options.Mix = None,
    stopping_strategy: options.Stopping = "first_exhausted",
    epoch: options.Epoch = 0,
    seed: options.Seed = 0,
    max_length: options.MaxLength = None,
    overlength: options.Overlength = "error",
    max_pixels: options.MaxPixels = None,
    add_stop: options.AddStop = None,
    ignored_keys: options.IgnoredKeys = None,
    min_shared: options.MinShared = 0,
    workers: options.Workers = 0,
    cache: options.Cache = None,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Draw packed rows: which samples share a row, where their images are, and what is padding.

    A data set is planned first, from image headers; no pixel is decoded. With --min-shared samples that begin alike
    share rows, and a row is drawn as the tree of what is computed once; so is a row of a folder that was packed so.
    """
    from vlmpack.store.manifest import is_store

    console, numbers = Console(), row or [0]
    if is_store(Path(source).expanduser()):
        _check_unplanned(context, source)
        rows = stored_rows(source)
    else:
        check_finished(source)
        mixed = MixOptions.of(mix, stopping_strategy, epoch)
        inputs = InputOptions(
            dataset=source, processor=_checked_processor(source, processor), split=split, num=num, seed=seed,
            max_length=max_length, overlength=overlength, max_pixels=max_pixels, image_root=image_root,
            branches=branches, columns=columns or (),
            mix=mixed, add_stop=add_stop, ignored_keys=ignored_keys or (),
        )  # fmt: skip
        rows = planned_rows(
            inputs, quiet=quiet, numbers=numbers, capacity=capacity, workers=workers, cache=cache,
            min_shared=min_shared or None,
        )  # fmt: skip
    if as_json:
        typer.echo(
            json.dumps({"summary": rows.summary, "rows": [rows.to_dict(number) for number in numbers]}, indent=2)
        )
    else:
        print_rows(rows, numbers, console, tokens_per_cell=tokens_per_cell)


_OF_ANY_ROWS = {"source", "row", "processor", "tokens_per_cell", "as_json", "quiet"}
"""Options that have a meaning for rows that are packed already; a processor may be named all the same."""


def _check_unplanned(context: typer.Context, source: str) -> None:
    """Refuse options by which rows would be planned.

    Raises:
        ConfigError: some are given; names them.
    """
    names = {parameter.name: parameter.opts[0] for parameter in context.command.params}
    others = [name for name in names if name is not None and name not in _OF_ANY_ROWS]
    typed = [name for name in others if str(context.get_parameter_source(name)).endswith("COMMANDLINE")]
    if planned := [names[name] for name in typed]:
        raise ConfigError(f"{source} is packed already, so {', '.join(planned)} would be ignored; leave it out")


def print_rows(rows: Rows, numbers: Sequence[int], console: Console, *, tokens_per_cell: int | None = None) -> None:
    """Print the source in one line, then a ribbon for each row, or its tree.

    Args:
        rows: of the source.
        numbers: of the rows that are drawn; negative ones count from the end.
        console: where.
        tokens_per_cell: None: as few as `LINES` lines allow, a round number.

    Raises:
        ConfigError: there is no such row.
    """
    size = {"width": console.width, "tokens_per_cell": tokens_per_cell}
    drawn = [(rows.ribbon(number, **size), rows.drawn_tree(number, **size)) for number in numbers]
    console.print(rows.summary, highlight=False, markup=False, soft_wrap=not console.is_terminal)
    for number, (ribbon, tree) in zip(numbers, drawn, strict=True):
        console.print(f"\n[bold]{rows.heading(number, ribbon, tree)}[/]", highlight=False)
        console.print(ribbon.draw() if tree is None else tree.draw(console))


# ---------------------------------------------------------------------- rows


@final
@dataclass(frozen=True, kw_only=True)
class Rows:
    """All rows of a source, without their pixels."""

    summary: str
    """The source in one line."""
    count: int
    """Rows."""
    capacity: int
    """Tokens that a row may hold."""
    slots: SlotRule
    """Rounding of samples to slots."""
    samples: Callable[[int], Sequence[Encoded]]
    """Reads the samples of a row."""
    tree: Callable[[int], PrefixTree | None] = lambda row: None
    """Finds what the samples of a row share; None: nothing, or they are not to."""

    def ribbon(self, number: int, *, width: int, tokens_per_cell: int | None = None) -> Ribbon:
        """Read one row and cut it into cells, see `Ribbon.of`; negative numbers count from the end.

        Raises:
            ConfigError: there is no such row.
        """
        from vlmpack.layout.segments import Segments

        samples = self._read(number)
        segments = Segments.from_lengths([sample.num_tokens for sample in samples], self.slots)
        types, names = _types(samples, segments), _names(samples)
        return Ribbon.of(segments, types, names, width=width, tokens_per_cell=tokens_per_cell)

    def drawn_tree(self, number: int, *, width: int, tokens_per_cell: int | None = None) -> TreeDrawing | None:
        """Find the tree of a row, see `TreeDrawing.of`; None: its samples share nothing, or are not to.

        Raises:
            ConfigError: there is no such row.
        """
        samples = self._read(number)
        tree = self.tree(number % self.count)
        if tree is None:
            return None
        size = {"width": width, "tokens_per_cell": tokens_per_cell}
        return TreeDrawing.of(tree, _types(samples, tree.segments), _names(samples), **size)

    def to_dict(self, number: int) -> dict[str, Any]:
        """Return a row in numbers, for JSON; its tree is None where samples share nothing.

        Raises:
            ConfigError: there is no such row.
        """
        samples, tree = self._read(number), self.drawn_tree(number, width=80)
        return {
            "row": number % self.count,
            "capacity": self.capacity,
            "samples": [
                {"sample": name, "tokens": sample.num_tokens, "media_tokens": int((sample.types != 0).sum())}
                for name, sample in zip(_names(samples), samples, strict=True)
            ],
            "tree": None if tree is None else tree.to_dict(),
        }

    def heading(self, number: int, ribbon: Ribbon, tree: TreeDrawing | None = None) -> str:
        """Format a row's place among the rows, and its fill ratio: tokens that are computed over the capacity."""
        total, real = (ribbon.total, sum(ribbon.lengths)) if tree is None else (tree.tree.num_tokens,) * 2
        full = f"{total:,} of {self.capacity:,} tokens, {real / self.capacity:.2%} full"
        return f"row {number % self.count:,} of 0 to {self.count - 1:,}: {full}"

    def _read(self, number: int) -> Sequence[Encoded]:
        check_row(number, self.count)
        return self.samples(number % self.count)


def _types(samples: Sequence[Encoded], segments: Segments) -> np.ndarray:
    """int64 [T]: the token types of a row; 0 in gaps."""
    import numpy as np

    types = np.zeros(segments.total, np.int64)
    for (start, stop), sample in zip(segments.spans[: len(samples)], samples, strict=True):
        types[start:stop] = sample.types
    return types


def _names(samples: Sequence[Encoded]) -> list[int | str]:
    """Name samples by their ids, or else by their places in the row."""
    return [place if sample.sample_id is None else sample.sample_id for place, sample in enumerate(samples)]


def check_row(number: int, count: int, *, most: str = "") -> None:
    """Refuse a row that does not exist.

    Args:
        number: negative ones count from the end.
        count: rows.
        most: "at most " where there may be fewer.

    Raises:
        ConfigError: there is no such row.
    """
    if not -count <= number < count:
        raise ConfigError(f"--row {number}: there are {most}{count} rows, 0 to {count - 1}")


def _checked_processor(source: str, processor: str | None) -> str:
    """Return the processor of a data set.

    Raises:
        ConfigError: it is missing, or the data set is.
    """
    if processor is not None:
        return processor
    if source != SYNTHETIC and not Path(source).expanduser().exists():
        raise ConfigError(
            f"there is no file or folder {source} here; give a folder written by `vlmpack pack`, or a data set and its "
            "--processor (a hub id, a folder, or tiny)"
        )
    raise ConfigError(
        f"{source} is no folder written by `vlmpack pack`, so it is read as a data set: that needs --processor "
        "(a hub id, a folder, or tiny)"
    )


def stored_rows(source: str) -> Rows:
    """Open the rows of a packed folder.

    Raises:
        ConfigError: the folder is damaged.
    """
    from vlmpack.store.read import PackedDataset

    dataset = PackedDataset(Path(source).expanduser())
    counts, capacity = dataset.manifest.counts, dataset.manifest.capacity
    return Rows(
        summary=f"{source}: {counts.samples:,} samples in {counts.rows:,} rows of {capacity:,} tokens, "
        f"{dataset.manifest.fill_ratio:.2%} full{_left_out(counts.refused, counts.dropped)}",
        count=len(dataset),
        capacity=capacity,
        slots=dataset.slots,
        samples=dataset.measured,
        tree=dataset.tree,
    )


def planned_rows(
    source: InputOptions,
    *,
    quiet: bool = False,
    numbers: Sequence[int],
    capacity: int,
    workers: int = 0,
    cache: str | None = None,
    min_shared: int | None = None,
) -> Rows:
    """Plan the rows of a data set.

    Args:
        source: the data set and its processor.
        quiet: draw no progress.
        numbers: of the rows that will be drawn: impossible ones are refused before a sample is measured.
        capacity: of a row, in tokens.
        workers: processes that read samples.
        cache: file that keeps lengths.
        min_shared: samples that begin alike with so many tokens or more share rows; None: none do.

    Raises:
        ConfigError: no sample can be packed, or the data set has too few samples for one of the rows.
    """
    from vlmpack.layout.segments import SlotRule
    from vlmpack.plan.planner import plan_bins
    from vlmpack.store.content import tree_of

    inputs = open_inputs(source)
    for number in numbers:
        check_row(number, len(inputs.dataset), most="at most ")
    table = measure(inputs, quiet=quiet, workers=workers, cache=cache, min_shared=min_shared)
    if not len(table):
        raise ConfigError(
            f"none of {table.measured} samples can be used: {table.reasons}; `vlmpack analyze` lists the reasons"
        )
    plan = plan_bins(table, capacity, oversize="drop", groups=table.groups)
    if not len(plan):
        raise ConfigError(f"all {len(table)} samples exceed a row of {capacity} tokens; raise --capacity")

    def samples(row: int) -> list[Encoded]:
        return [inputs.collator.measure(inputs.dataset[place], place) for place in plan.bins[row]]

    def tree(row: int) -> PrefixTree | None:
        return (
            None if min_shared is None else tree_of(samples(row), limits=inputs.collator.limits, min_shared=min_shared)
        )

    return Rows(
        summary=f"{source.title}: {len(plan.sample_ids):,} samples in {len(plan):,} rows of {capacity:,} tokens, "
        f"{plan.fill:.2%} full{_left_out(len(table.refused), len(plan.dropped) - len(table.refused))}",
        count=len(plan),
        capacity=capacity,
        slots=SlotRule(),
        samples=samples,
        tree=tree,
    )


def _left_out(refused: int, too_long: int) -> str:
    counts = {"cannot be used": refused, "exceed a row": too_long}
    return "".join(f"; {count:,} {what}" for what, count in counts.items() if count)


# ---------------------------------------------------------------------- ribbons


@final
@dataclass(frozen=True, kw_only=True)
class Ribbon:
    """One row, cut into cells of the same number of tokens."""

    cells: Sequence[int]
    """Twice the sample's place in the row, plus 1 for its images; -1: padding. What most of a cell's tokens are."""
    tokens_per_cell: int
    """The last cell may hold fewer."""
    lengths: tuple[int, ...]
    """Tokens of each sample of the row."""
    media: tuple[int, ...]
    """Tokens of each sample that belong to images and videos."""
    names: tuple[str, ...]
    """Of the samples."""
    total: int
    """Tokens of the row T, padding included."""
    width: int
    """Columns of the terminal."""

    @classmethod
    def of(
        cls,
        segments: Segments,
        types: np.ndarray | None = None,
        sample_ids: Sequence[int | str] | None = None,
        *,
        width: int = 80,
        tokens_per_cell: int | None = None,
    ) -> Ribbon:
        """Cut a row into cells.

        Args:
            segments: of the row, T tokens wide.
            types: [T] `mm_token_type_ids`: 0 text, others image or video; None: all text.
            sample_ids: of its samples; None: their places in the row.
            width: columns of the terminal.
            tokens_per_cell: None: as few as `LINES` lines allow, a round number.

        Raises:
            LayoutError: types or ids of another row.
        """
        import numpy as np

        count, total = segments.num_samples, segments.total
        names = tuple(str(name) for name in (range(count) if sample_ids is None else sample_ids))
        types = np.zeros(total, np.int64) if types is None else np.asarray(types).reshape(-1)
        if len(types) != total or len(names) != count:
            raise LayoutError(
                f"a row of {count} samples in {total} tokens was given {len(names)} sample ids and {len(types)} "
                "token types"
            )
        codes = 2 * segments.seq_idx().numpy().astype(np.int64) + (types != 0)
        codes[segments.padding_mask().numpy()] = PADDING
        each = tokens_per_cell or _round_up(total, LINES * max(width - _margin(total), 1))
        return cls(
            cells=[_majority(codes[at : at + each]) for at in range(0, total, each)],
            tokens_per_cell=each,
            lengths=segments.lengths[:count],
            media=tuple(int((types[start:stop] != 0).sum()) for start, stop in segments.spans[:count]),
            names=names,
            total=total,
            width=width,
        )

    def draw(self) -> Group:
        """Draw the ribbon in lines, a legend of its letters, and its totals."""
        per_line = max(self.width - _margin(self.total), 1)
        lines = [self._line(at, per_line) for at in range(0, len(self.cells), per_line)]
        visible = {cell // 2 for cell in self.cells if cell != PADDING}
        legend = [self._entry(sample, is_visible=sample in visible) for sample in range(len(self.names))]
        totals = self._totals(has_hidden=len(visible) < len(legend))
        return Group(*lines, Text(), Columns(legend, padding=(0, 3)), Text(), totals)

    def _line(self, first: int, per_line: int) -> Text:
        line = Text(no_wrap=True)
        line.append(f"{first * self.tokens_per_cell:>{_margin(self.total) - 1},} ", style="dim")
        for cell, run in groupby(self.cells[first : first + per_line]):
            line.append(_letter(cell) * len(list(run)), style=_style(cell))
        return line

    def _entry(self, sample: int, *, is_visible: bool) -> Text:
        """Make a sample's entry in the legend; its letter is in brackets if the sample dominates no cell."""
        letter = _letter(2 * sample)
        entry = Text(no_wrap=True)
        entry.append(letter if is_visible else f"({letter})", style=_style(2 * sample))
        media = f" ({self.media[sample]:,} image)" if self.media[sample] else ""
        return entry.append(f" {self.names[sample]}: {self.lengths[sample]:,}{media}")

    def _totals(self, *, has_hidden: bool) -> Text:
        real, media, count = sum(self.lengths), sum(self.media), len(self.names)
        images = f" + {media:,} image (capitals)" if media else ""
        tokens = f"{self.total:,} tokens = {real - media:,} text{images} + {self.total - real:,} padding (dots)"
        each = f"{self.tokens_per_cell:,} tokens" if self.tokens_per_cell > 1 else "a token"
        hidden = "; samples in brackets fill none" if has_hidden else ""
        return Text(f"{tokens}, {count:,} sample{'' if count == 1 else 's'}. A character is {each}{hidden}.")


def _letter(cell: int) -> str:
    return "." if cell == PADDING else letter(cell // 2, is_media=cell % 2 == 1)


def _style(cell: int) -> str:
    return "dim" if cell == PADDING else style(cell // 2, is_media=cell % 2 == 1)


def _majority(codes: np.ndarray) -> int:
    """Return the most frequent code of a cell; of two alike, the first."""
    import numpy as np

    values, first, counts = np.unique(codes, return_index=True, return_counts=True)
    return int(values[np.lexsort((first, -counts))[0]])


def _margin(total: int) -> int:
    """Return the columns in front of a line, for its place in the row."""
    return len(f"{total:,}") + 1


def _round_up(total: int, cells: int) -> int:
    """Return the smallest power of two that divides a row into at most so many cells."""
    return 1 << max(-(-total // cells) - 1, 0).bit_length()
