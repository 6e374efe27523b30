"""VLMCollator: a list of sample dicts → one batch, for a DataLoader, HF Trainer or TRL."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from numbers import Integral
from pathlib import Path
from traceback import extract_tb
from typing import Any, Literal, final, get_args

import torch

from vlmpack.collate.assemble import BrokenPixels, filler, has_broken_pixels, to_packed, to_padded
from vlmpack.collate.buffers import PixelBuffers
from vlmpack.collate.columns import Markers
from vlmpack.collate.encode import OVERLENGTH, Encoder, Overlength, fit
from vlmpack.collate.encoded import Encoded, TrainOn
from vlmpack.collate.processor_metadata import read_processor
from vlmpack.collate.skipped import SkipLimit, SkipLog
from vlmpack.data import ImageLimits
from vlmpack.errors import ConfigError, Refusal, SampleError, VlmpackError, check_kind
from vlmpack.layout import PackedRow, PaddedBatch, SlotRule, round_up

_ROOM = Path(__file__).parent

BatchLayout = Literal["padded", "packed"]
OnBad = Literal["raise", "skip"]


@final
class VLMCollator:
    """Turn samples into a padded batch or a packed row, each checked on its own first.

    Args:
        processor: a Qwen2VL, Qwen2.5VL or Qwen3VL processor (also Qwen3.5's and Qwen4-exp's), used as it is; of a text
            model (Qwen3, Qwen3-Next), its tokenizer.
        layout: "padded" gives [B, S] with the 2D mask, "packed" one row [1, T]; both carry lengths on the host.
        slots: how samples lie in a packed row; None: without any gaps.
        max_length: most tokens of a sample; None: no limit.
        overlength: what happens to a longer one: "error" refuses it as a bad sample, "drop" leaves it out and counts
            it, "truncate" cuts it between messages or beside an image, never inside one.
        train_on: "assistant" learns what assistant turns say, their end included (of prompt and completion only the
            completion); "all" learns everything but media tokens. Labels that tokenised samples bring are kept.
        markers: what `<image>` and `<video>` in a text are. "auto": places of the media of a sample's columns, and text
            in a sample that has no such column; "places": always places, so that one without its medium is refused;
            "text": always text.
        on_bad: "raise" stops at the first bad sample, "skip" leaves it out, counts it and writes it down.
        skip_log: path of a JSON-lines file for refused samples; None: they are only counted.
        skip_limit: how many skipped samples are too many; None: `SkipLimit()`.
        limits: caps for images, read from their headers before decoding.
        vocab_size: token ids are below this; None: the tokenizer's number of entries.
        pixel_dtype: what pixels are stored as (bfloat16 halves their bytes); None: float32, as the processor gives.
        pixel_buffers: blocks of memory in which the pixels of batches are joined in turn, at most so many; a block is
            used again when nothing refers to it any more. 0: new memory for every batch.

    Raises:
        ConfigError: settings that contradict each other.
        FamilyError: a processor of another family.
    """

    def __init__(
        self,
        processor: Any,
        *,
        layout: BatchLayout = "padded",
        slots: SlotRule | None = None,
        max_length: int | None = None,
        overlength: Overlength = "error",
        train_on: TrainOn = "assistant",
        markers: Markers = "auto",
        on_bad: OnBad = "raise",
        skip_log: str | Path | None = None,
        skip_limit: SkipLimit | None = None,
        limits: ImageLimits | None = None,
        vocab_size: int | None = None,
        pixel_dtype: torch.dtype | None = None,
        pixel_buffers: int = 8,
    ) -> None:
        _check_choice("layout", layout, get_args(BatchLayout))
        _check_choice("overlength", overlength, get_args(Overlength))
        _check_choice("train_on", train_on, get_args(TrainOn))
        _check_choice("markers", markers, get_args(Markers))
        _check_choice("on_bad", on_bad, get_args(OnBad))
        _check_lengths(layout, slots, max_length, overlength)
        _check_pixels(pixel_dtype, pixel_buffers)
        if skip_limit is not None:
            check_kind("skip_limit", skip_limit, SkipLimit, "SkipLimit(max_bad_fraction=0.05)")
        self.layout = layout
        self.slots = slots or SlotRule()
        self.max_length = max_length
        self.overlength: Overlength = overlength
        self.on_bad = on_bad
        self.train_on: TrainOn = train_on
        self.markers: Markers = markers
        self.limits = limits or ImageLimits()
        self.pixel_dtype = pixel_dtype
        self.buffers = PixelBuffers(pixel_buffers)
        self.processor = processor
        self.metadata = read_processor(processor, vocab_size=vocab_size)
        self.skip_log = SkipLog(skip_log, limit=skip_limit)
        """Counts of given, used and refused samples, by reason."""
        self._encoder = Encoder(
            processor=processor,
            metadata=self.metadata,
            limits=self.limits,
            train_on=train_on,
            markers=markers,
            name_unread=self.skip_log.name_unread,
            max_length=max_length,
        )

    def __repr__(self) -> str:
        names = ("layout", "slots", "max_length", "overlength", "train_on", "on_bad", "skip_log")
        given = (f"{name}={self.__dict__[name]!r}" for name in names if self.__dict__[name] not in (None, SlotRule()))
        return f"VLMCollator({type(self.processor).__name__}, {', '.join(given)})"

    def __call__(self, features: Sequence[Mapping[str, Any] | SampleError]) -> dict[str, Any]:
        """The batch as a dictionary for `model(**batch)`, host metadata under the key "vlmpack"."""
        return self.collate(features).to_hf()

    def collate(self, features: Sequence[Mapping[str, Any] | SampleError]) -> PaddedBatch | PackedRow:
        """The batch as an object. A feature may be an error, as an `OpenDataset` gives it: it is refused as any other.

        `metadata.sample_ids` names the samples that are in it, by their own id (`id` or `sample_id`) or else by their
        place in `features`. It is empty where there are none, because every sample was refused or no features were
        given (an empty row of a sampler): then the batch holds one smallest image with nothing to learn
        (`num_targets` 0), so that this rank still makes its step.

        Raises:
            SampleError: a sample cannot be used and `on_bad` is "raise"; says which, what was seen and what to do.
            ConfigError: no sample of this kind can be used, such as all without a known column, and `on_bad` is
                "raise"; or more were refused than the skip limit allows.
            LayoutError: the samples do not fit the fixed sizes of `slots`.
        """
        if isinstance(features, Mapping):
            raise ConfigError("collate makes a batch of a list of samples, got one sample: give [sample]")
        return self._assemble(partial(self._encoded, feature, index) for index, feature in enumerate(features))

    def outline(self, feature: Mapping[str, Any], index: int | None = None, *, estimate: bool = False) -> Encoded:
        """One sample without its pixels: token ids, labels, and the grid of each image from its header.

        What `collate` would make of the sample, `max_length` included, in a small part of the time. Damage to an
        image that its header does not show is found by `decode`. The log of skipped samples does not count it.

        Args:
            feature: a sample dict.
            index: its place in the data set, for errors and as its id where it has none of its own.
            estimate: count one token for each square of an image's own pixels, begun ones included, whatever the
                processor's bounds and rule are. Nothing can be materialised from that.

        Raises:
            SampleError: the sample cannot be used, whatever `on_bad` says.
            ConfigError: no sample of this kind can be used and `on_bad` is "raise", or images cannot be measured with
                this processor.
        """
        sample = self._checked(feature, index, lambda: self._fitted(self._encoder.outline(feature, estimate=estimate)))
        return sample if index is None else _with_id(sample, index)

    def length(self, feature: Mapping[str, Any]) -> int:
        """Tokens that a sample takes up in a row, its whole slot, as `outline` tells: `length` of a `PackedStream`.

        A sample that `collate` leaves out takes up the smallest slot, so that a stream hands it over and it is counted.

        Raises:
            SampleError, ConfigError: as `outline`; the first only if `on_bad` is "raise".
        """
        outcome = self._outcome(lambda: self.outline(feature))
        if isinstance(outcome, SampleError) and self._is_fatal(outcome):
            raise outcome
        return round_up(outcome.num_tokens if isinstance(outcome, Encoded) else 1, self.slots.multiple)

    def decode(self, outlines: Sequence[Encoded]) -> PaddedBatch | PackedRow:
        """The batch of samples that `outline` gave: their media are read and cut into patches now.

        Equal to `collate` of the same samples. A sample whose media cannot be used, or have changed since, is treated
        as `on_bad` says; media that `overlength="truncate"` cut off are not looked at again.

        Raises:
            SampleError, ConfigError, LayoutError: as `collate`.
        """
        return self._assemble(partial(self._filled, outline, index) for index, outline in enumerate(outlines))

    def leaves_out(self, reason: str) -> bool:
        """Whether a sample refused for this reason is left out because the settings say so, not because it is bad."""
        return reason == OVERLENGTH and self.overlength == "drop"

    def _assemble(self, makers: Iterable[Callable[[], Encoded]]) -> PaddedBatch | PackedRow:
        """The batch of what can be used; all samples are counted, in their order, once that is known."""
        outcomes: list[Encoded | SampleError] = []
        for make in makers:
            outcomes.append(self._outcome(make))
            if self._is_fatal(outcomes[-1]):
                self._count(outcomes)  # raises
        batch = self._lay_out(outcomes)
        self._count(outcomes)
        return batch

    def _lay_out(self, outcomes: list[Encoded | SampleError]) -> PaddedBatch | PackedRow:
        """The batch. Samples whose pixels turn out to be broken as they are joined become errors in `outcomes`."""
        usable = [(at, sample) for at, sample in enumerate(outcomes) if isinstance(sample, Encoded)]
        try:
            return self._joined([_with_id(sample, at) for at, sample in usable] or [filler(self.metadata)])
        except BrokenPixels as broken:
            for at, sample in usable:
                if has_broken_pixels(sample):
                    named = {"index": at, "reason": "pixels_not_finite", "sample_id": sample.sample_id}
                    outcomes[at] = SampleError(str(broken), **named)
        return self._lay_out(outcomes)

    def _joined(self, samples: Sequence[Encoded]) -> PaddedBatch | PackedRow:
        settings: dict[str, Any] = {
            "pad_token_id": self.metadata.pad_token_id,
            "pixel_dtype": self.pixel_dtype,
            "buffers": self.buffers,
        }
        if self.layout == "packed":
            return to_packed(samples, rule=self.slots, **settings)
        return to_padded(samples, **settings)

    # ------------------------------------------------------------------ one sample

    def _encoded(self, feature: Mapping[str, Any] | SampleError, index: int) -> Encoded:
        if isinstance(feature, SampleError):
            place = feature.index if feature.sample_id is None else feature.sample_id
            raise SampleError(feature.detail, index=index, reason=feature.reason, sample_id=place) from feature
        return self._checked(feature, index, lambda: self._fitted(self._encoder.encode(feature)))

    def _filled(self, outline: Encoded, index: int) -> Encoded:
        named = {} if outline.sample_id is None else {"id": outline.sample_id}
        return self._checked(named, index, lambda: self._encoder.decode(outline))

    def _fitted(self, sample: Encoded) -> Encoded:
        return fit(sample, self.metadata, max_length=self.max_length, overlength=self.overlength)

    def _checked(self, feature: Mapping[str, Any], index: int | None, make: Callable[[], Encoded]) -> Encoded:
        """What `make` gives, under the sample's own id; its refusal names the sample."""
        sample_id = None
        try:
            sample_id = sample_id_of(feature)
            sample = make()
        except VlmpackError:
            raise
        except Exception as error:  # a data set may hold anything
            raise self._error(_refusal_of(error), index, sample_id) from error
        return sample if sample.sample_id == sample_id else replace(sample, sample_id=sample_id)

    def _error(self, refusal: Refusal, index: int | None, sample_id: int | str | None) -> SampleError | ConfigError:
        """A refusal under the sample's name; a mistake of the setup, unless samples are to be skipped."""
        named = index is not None or sample_id is None
        message = refusal.message if named else f"sample {sample_id!r}: {refusal.message}"
        error = SampleError(message, index=index, reason=refusal.reason, sample_id=sample_id)
        return ConfigError(str(error)) if refusal.of_all and self.on_bad == "raise" else error

    # ------------------------------------------------------------------ the account

    def _count(self, outcomes: Iterable[Encoded | SampleError]) -> None:
        """Tell the log of skipped samples; raises the first error that is not to be skipped."""
        with self.skip_log.at_once():
            for kind, group in groupby(outcomes, key=type):
                if kind is Encoded:
                    self.skip_log.use(len(list(group)))
                    continue
                for error in group:
                    assert isinstance(error, SampleError)
                    self._count_bad(error)

    def _count_bad(self, error: SampleError) -> None:
        if self._is_fatal(error):
            self.skip_log.note(error)
            raise error
        if self.leaves_out(error.reason):
            self.skip_log.note(error)
        else:
            self.skip_log.refuse(error)

    def _outcome(self, make: Callable[[], Encoded]) -> Encoded | SampleError:
        """A sample, or why there is none: without its traceback, which would hold on to all that holds the error.

        One that is skipped is also without its cause, which has a traceback of its own.
        """
        try:
            return make()
        except SampleError as error:
            if not self._is_fatal(error):
                error.__cause__ = error.__context__ = None
            return error.with_traceback(None)

    def _is_fatal(self, outcome: Encoded | SampleError) -> bool:
        return isinstance(outcome, SampleError) and self.on_bad == "raise" and not self.leaves_out(outcome.reason)


def _refusal_of(error: Exception) -> Refusal:
    """Why a sample cannot be used. What no file of this room foresaw keeps its name and its place."""
    if isinstance(error, Refusal):
        return error
    if isinstance(error, RecursionError):
        return Refusal("bad_row", "it is nested too deeply to be read; give lists and mappings of a few levels")
    if isinstance(error, MemoryError):
        seen = f"the memory does not suffice for it ({error or 'MemoryError'})"
        return Refusal("out_of_memory", f"{seen}; make its images smaller, or lower ImageLimits.max_pixels")
    frame = [frame for frame in extract_tb(error.__traceback__) if _ROOM in Path(frame.filename).parents][-1]
    place = f"{Path(frame.filename).name}, line {frame.lineno}, in {frame.name}"
    return Refusal("unexpected", f"{type(error).__name__}: {error} ({place}); look at what its columns hold there")


def _with_id(sample: Encoded, index: int) -> Encoded:
    """Named by its place where it has no name of its own."""
    return sample if sample.sample_id is not None else replace(sample, sample_id=index)


def sample_id_of(feature: Any) -> int | str | None:
    """The id that a sample brings with it (`id` or `sample_id`); None: it brings none."""
    if not isinstance(feature, Mapping):
        return None
    value = feature.get("id") if feature.get("id") is not None else feature.get("sample_id")
    return value if value is None or isinstance(value, int | str) else str(value)


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{name}={value!r} is not known; choose one of {', '.join(map(repr, choices))}")


def _check_lengths(layout: BatchLayout, slots: SlotRule | None, max_length: int | None, overlength: Overlength) -> None:
    if slots is not None:
        check_kind("slots", slots, SlotRule, "SlotRule(multiple=4)")
    if layout == "padded" and slots is not None:
        raise ConfigError(
            "slots say how samples lie in a packed row, but layout='padded'; choose layout='packed', or give the slots "
            "to enable_packing(model, StepConfig(slots=...)), which packs the padded batch"
        )
    if max_length is None and overlength != "error":
        raise ConfigError(f"overlength={overlength!r} needs max_length=, the most tokens a sample may have")
    if max_length is not None and (not isinstance(max_length, Integral) or max_length < 2):
        raise ConfigError(f"max_length={max_length!r} is no length to learn from; it is a whole number of at least 2")


def _check_pixels(dtype: torch.dtype | None, buffers: int) -> None:
    if buffers < 0:
        raise ConfigError(f"pixel_buffers={buffers} must be a number of blocks, or 0 for new memory every time")
    if dtype is not None and not dtype.is_floating_point:
        raise ConfigError(f"pixel_dtype={dtype} would cut the normalised pixels off to whole numbers; use a float type")
