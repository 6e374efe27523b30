"""Collate sample dicts into one batch, for a DataLoader, HF Trainer or TRL: `VLMCollator`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from traceback import extract_tb
from typing import Any, Literal, get_args

import torch

from vlmpack.collate.assemble import SharePrefixes, to_packed, to_padded
from vlmpack.collate.buffers import NotFinite, PixelBuffers, is_finite
from vlmpack.collate.encode import Encoder
from vlmpack.collate.encoded import OVERLENGTH, Encoded, Overlength, TrainOn, check_labels_are_ids, fit
from vlmpack.collate.media import BatchMedia
from vlmpack.collate.processor_metadata import read_processor
from vlmpack.collate.skipped import SkipLimit, SkipLog
from vlmpack.collate.video import FrameSampling, file_rules_of
from vlmpack.data.formats import CHANNEL_COLUMN
from vlmpack.data.images import ImageLimits
from vlmpack.data.messages import Markers
from vlmpack.data.videos import VideoLimits
from vlmpack.errors import (
    ConfigError,
    Refusal,
    SampleError,
    SkippedWarning,
    VlmpackError,
    check_choice,
    check_kind,
    check_whole_number,
)
from vlmpack.families.registry import family_of_processor
from vlmpack.layout.batch import PaddedBatch
from vlmpack.layout.row import PackedRow
from vlmpack.layout.segments import SlotRule, round_up

_PACKAGE = Path(__file__).parent

BatchLayout = Literal["padded", "packed"]
OnBad = Literal["raise", "skip"]


class VLMCollator:
    """Turn samples into a padded batch or a packed row, each checked on its own first.

    Args:
        processor: the processor of a model of any supported family, used as it is; of a text model its tokenizer.
        layout: "padded" gives [B, S] with the 2D mask, "packed" one row [1, T]; both carry lengths on the host.
        slots: how samples lie in a packed row; None: without any gaps.
        share_prefixes: compute what samples of a packed row begin with alike, images included, once: the row gets a
            `PrefixTree`. True: `SharePrefixes()`. Labels have to be token ids.
        max_length: most tokens of a sample; None: no limit.
        overlength: what happens to a longer one: "error" refuses it as a bad sample, "drop" leaves it out and counts
            it, "truncate" keeps its first tokens and "truncate_start" its last ones, without the media and the ends of
            answers that the limit would tear; `skip_log.truncated` counts such samples.
        train_on: "assistant" learns the assistant's turns, their end included (of prompt and completion only the
            completion), "last" only the last of them; "all" learns everything but media tokens. Labels of tokenised
            samples are kept.
        add_stop: a token of the tokenizer, such as "</s>", that is written and trained on behind the last answer of a
            sample if the chat template writes none there that ends it; None: nothing is, and a warning says so once.
        ignored_keys: keys of messages and their parts that are left out. Any other key has to be one that the chat
            template writes, or the sample is refused.
        markers: the meaning of `<image>`, `<video>` and `<audio>` in a text. "auto": placeholders of the media in a
            sample's columns, and text in a sample without such a column; "places": always placeholders, refused without
            their medium; "text": always text.
        on_bad: "raise" stops at the first bad sample, "skip" leaves it out, counts it and writes it down.
        skip_log: path of a JSON-lines file for refused samples; None: they are only counted, and a `SkippedWarning`
            says so at the first.
        skip_limit: the number of skipped samples above which the run stops; None: `SkipLimit()`.
        limits: caps for images, read from their headers before decoding.
        sampling: how many frames of a video's file are taken; None: as the processor's video processor does it.
        video_limits: caps for files of videos.
        vocab_size: token ids are below this; None: the tokenizer's number of entries.
        pixel_dtype: dtype of the pixels (bfloat16 halves their bytes); None: the processor's, float32 (of Llama 4
            bfloat16).
        pixel_buffers: most blocks of memory in which the pixels of batches are joined in turn; a block is reused when
            nothing refers to it any more. 0: new memory for every batch.

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
        share_prefixes: bool | SharePrefixes = False,
        max_length: int | None = None,
        overlength: Overlength = "error",
        train_on: TrainOn = "assistant",
        add_stop: str | None = None,
        ignored_keys: Collection[str] = (),
        markers: Markers = "auto",
        on_bad: OnBad = "raise",
        skip_log: str | Path | None = None,
        skip_limit: SkipLimit | None = None,
        limits: ImageLimits | None = None,
        sampling: FrameSampling | None = None,
        video_limits: VideoLimits | None = None,
        vocab_size: int | None = None,
        pixel_dtype: torch.dtype | None = None,
        pixel_buffers: int = 8,
    ) -> None:
        check_choice("layout", layout, get_args(BatchLayout))
        check_choice("overlength", overlength, get_args(Overlength))
        check_choice("train_on", train_on, get_args(TrainOn))
        check_choice("markers", markers, get_args(Markers))
        check_choice("on_bad", on_bad, get_args(OnBad))
        _check_lengths(layout, slots, max_length, overlength)
        check_whole_number("pixel_buffers", pixel_buffers, at_least=0, remedy="0: new memory every time")
        if pixel_dtype is not None and not pixel_dtype.is_floating_point:
            raise ConfigError(f"pixel_dtype={pixel_dtype} would round normalised pixels to integers; use a float type")
        if skip_limit is not None:
            check_kind("skip_limit", skip_limit, SkipLimit, "SkipLimit(max_bad_fraction=0.05)")
        self.layout = layout
        self.slots = slots or SlotRule()
        self.max_length = max_length
        self.overlength: Overlength = overlength
        self.on_bad = on_bad
        self.train_on: TrainOn = train_on
        self.add_stop = add_stop
        self.ignored_keys = _ignored_keys(ignored_keys)
        self.markers: Markers = markers
        self.limits = limits or ImageLimits()
        self.pixel_dtype = pixel_dtype
        self.buffers = PixelBuffers(pixel_buffers)
        self.processor = processor
        self.metadata = read_processor(processor, vocab_size=vocab_size)
        if add_stop is not None and add_stop not in self.metadata.special_tokens:
            such_as = repr(self.metadata.eos_token)
            raise ConfigError(f"add_stop={add_stop!r} is no special token of the tokenizer, as {such_as} is")
        self.share_prefixes = _sharing(share_prefixes, layout, self.slots)
        is_whole = self.metadata.by_processor and self.metadata.has_vision
        self._family = family_of_processor(processor) if is_whole or self.metadata.has_audio else None
        self.file_rules = file_rules_of(processor, self.metadata, sampling=sampling, limits=video_limits)
        self.skip_log = SkipLog(skip_log, limit=skip_limit)
        """Counts of received, used and refused samples, by reason."""
        self._encoder = Encoder(
            processor=processor,
            metadata=self.metadata,
            limits=self.limits,
            train_on=train_on,
            markers=markers,
            name_unread=self.skip_log.name_unread,
            is_first=self.skip_log.is_first,
            max_length=max_length,
            truncates_start=overlength == "truncate_start",
            file_rules=self.file_rules,
            add_stop=add_stop,
            ignored_keys=self.ignored_keys,
        )

    def __repr__(self) -> str:
        names = ("layout", "slots", "share_prefixes", "max_length", "overlength", "train_on", "on_bad", "skip_log")
        values = ((name, getattr(self, name)) for name in names)
        changed = (f"{name}={value!r}" for name, value in values if value not in (None, SlotRule()))
        return f"VLMCollator({type(self.processor).__name__}, {', '.join(changed)})"

    def __call__(self, features: Sequence[Mapping[str, Any] | SampleError]) -> dict[str, Any]:
        """Collate samples into a dictionary for `model(**batch)`, host metadata under the key "vlmpack"."""
        return self.collate(features).to_hf()

    def collate(self, features: Sequence[Mapping[str, Any] | SampleError]) -> PaddedBatch | PackedRow:
        """Collate samples into a batch object. A feature may be an error, as an `OpenDataset` returns it for a bad row.

        `metadata.sample_ids` names the samples in it: by `id` or `sample_id`, or else by their place in `features`. It
        is empty where every sample was refused or `features` is empty (an empty row of a sampler). Then the batch
        holds one smallest image without targets (`num_targets` 0), so that this rank still makes its step.

        Raises:
            SampleError: a sample cannot be used and `on_bad` is "raise"; names it, with the remedy.
            ConfigError: no sample of this kind can be used, such as all without a known column, and `on_bad` is
                "raise"; or more were refused than the skip limit allows.
            LayoutError: the samples do not fit the fixed sizes of `slots`.
        """
        if isinstance(features, Mapping):
            raise ConfigError("collate makes a batch of a list of samples, got one sample: give [sample]")
        media = BatchMedia()
        return self._assemble(partial(self._encoded, feature, index, media) for index, feature in enumerate(features))

    def measure(self, feature: Mapping[str, Any], index: int | None = None) -> Encoded:
        """Encode a sample without its pixels: token ids, labels, and the grid of each image from its header.

        The result is that of `collate`, `max_length` included, in a small part of the time. `decode` finds damage that
        an image's header does not show. The log of skipped samples does not count the sample.

        Args:
            feature: a sample dict.
            index: its place in the data set, for errors and as its id where it has none of its own.

        Raises:
            SampleError: the sample cannot be used, whatever `on_bad` says.
            ConfigError: no sample of this kind can be used and `on_bad` is "raise", or images cannot be measured with
                this processor.
        """
        sample = self._checked(feature, index, lambda: self._fitted(self._encoder.measure(feature)))
        return sample if index is None else _with_id(sample, index)

    def length(self, feature: Mapping[str, Any]) -> int:
        """Return the tokens of a sample's slot in a row, as `measure` counts them: `length` of a `PackedStream`.

        A sample that `collate` leaves out takes up the smallest slot, so that a stream hands it over and it is counted.

        Raises:
            SampleError, ConfigError: as `measure`; the first only if `on_bad` is "raise".
        """
        outcome = self._outcome(lambda: self.measure(feature))
        if isinstance(outcome, SampleError) and self._is_fatal(outcome):
            raise outcome
        return round_up(outcome.num_tokens if isinstance(outcome, Encoded) else 1, self.slots.multiple)

    def decode(self, samples: Sequence[Encoded]) -> PaddedBatch | PackedRow:
        """Collate samples that `measure` returned: read their media and cut them into patches.

        Equal to `collate` of the same samples. `on_bad` decides about a sample whose media cannot be used or have
        changed since; media that `overlength="truncate"` cut off are not read.

        Raises:
            SampleError, ConfigError, LayoutError: as `collate`.
        """
        media = BatchMedia()
        return self._assemble(partial(self._decoded, sample, index, media) for index, sample in enumerate(samples))

    def leaves_out(self, reason: str) -> bool:
        """Return whether samples refused for this reason are left out by a setting, not because they are bad."""
        return reason == OVERLENGTH and self.overlength == "drop"

    def _assemble(self, makers: Iterable[Callable[[], Encoded]]) -> PaddedBatch | PackedRow:
        """Join the usable samples into a batch, then count all of them in their order."""
        outcomes: list[Encoded | SampleError] = []
        for make in makers:
            outcomes.append(self._outcome(make))
            if self._is_fatal(outcomes[-1]):
                self._count(outcomes)  # raises
        batch = self._lay_out(outcomes)
        self._count(outcomes)
        return batch

    def _lay_out(self, outcomes: list[Encoded | SampleError]) -> PaddedBatch | PackedRow:
        """Join samples into a batch; those whose pixels are not finite become errors in `outcomes`."""
        usable = [(at, sample) for at, sample in enumerate(outcomes) if isinstance(sample, Encoded)]
        samples = [_with_id(sample, at) for at, sample in usable] or [self._encoder.filler]
        to_row = partial(to_packed, rule=self.slots, sharing=self.share_prefixes)
        to_batch = to_row if self.layout == "packed" else to_padded
        further = {"pixel_dtype": self.pixel_dtype, "buffers": self.buffers, "family": self._family}
        try:
            return self._typed(to_batch(samples, pad_token_id=self.metadata.pad_token_id, **further))
        except NotFinite:
            for at, sample in usable:
                broken = {
                    kind for kind, media in sample.media.items() for x in media if not all(map(is_finite, x.values))
                }
                if broken:
                    message = "its pixels hold NaN or infinity; the image is broken or was normalised by 0"
                    if "audio" in broken:
                        message = "its input_features hold NaN or infinity; the audio is broken"
                    named = {"index": at, "reason": "pixels_not_finite", "sample_id": sample.sample_id}
                    outcomes[at] = SampleError(message, **named)
        return self._lay_out(outcomes)

    def _typed(self, batch: PaddedBatch | PackedRow) -> PaddedBatch | PackedRow:
        """Add the kinds of tokens by which experts are chosen, as the processor makes them, and those of a padded batch
        under the name that the unmodified model takes, where a model has such."""
        columns: dict[str, torch.Tensor] = {}
        if self._family is not None and self._family.expert_types is not None:
            types = self.processor.create_moe_mm_token_type_ids(batch.input_ids.numpy())
            columns[self._family.expert_types] = torch.from_numpy(types)
        name = None if self._family is None else self._family.token_types
        if isinstance(batch, PaddedBatch) and name not in (None, "mm_token_type_ids"):
            assert batch.mm_token_type_ids is not None
            columns[name] = batch.mm_token_type_ids
        return replace(batch, extras={**batch.extras, **columns}) if columns else batch

    # ------------------------------------------------------------------ one sample

    def _encoded(self, feature: Mapping[str, Any] | SampleError, index: int, media: BatchMedia) -> Encoded:
        if isinstance(feature, SampleError):
            place = feature.index if feature.sample_id is None else feature.sample_id
            raise SampleError(feature.detail, index=index, reason=feature.reason, sample_id=place) from feature
        return self._checked(feature, index, lambda: self._fitted(self._encoder.encode(feature, media)))

    def _decoded(self, sample: Encoded, index: int, media: BatchMedia) -> Encoded:
        named = {} if sample.sample_id is None else {"id": sample.sample_id}
        return self._checked(named, index, lambda: self._encoder.media.decode(self._sharable(sample), media))

    def _fitted(self, sample: Encoded) -> Encoded:
        return fit(self._sharable(sample), self.metadata, max_length=self.max_length, overlength=self.overlength)

    def _sharable(self, sample: Encoded) -> Encoded:
        if self.share_prefixes is not None:
            check_labels_are_ids(sample)
        return sample

    def _checked(self, feature: Mapping[str, Any], index: int | None, make: Callable[[], Encoded]) -> Encoded:
        """Make a sample with the id in `feature`; a refusal becomes an error that names it."""
        sample_id = None
        try:
            sample_id, channel = sample_id_of(feature), channel_of(feature)
            sample = make()
        except VlmpackError:
            raise
        except Exception as error:  # a data set may hold anything
            raise self._error(_to_refusal(error), index, sample_id) from error
        names = {"sample_id": sample_id, "channel": sample.channel if channel is None else channel}
        is_named = (sample.sample_id, sample.channel) == tuple(names.values())
        return sample if is_named else replace(sample, **names)

    def _error(self, refusal: Refusal, index: int | None, sample_id: int | str | None) -> SampleError | ConfigError:
        """Name the sample in a refusal; a mistake of the setup is a ConfigError, unless samples are to be skipped."""
        is_named = index is not None or sample_id is None
        message = refusal.message if is_named else f"sample {sample_id!r}: {refusal.message}"
        error = SampleError(message, index=index, reason=refusal.reason, sample_id=sample_id)
        return ConfigError(str(error)) if refusal.of_all and self.on_bad == "raise" else error

    # ------------------------------------------------------------------ counts

    def _count(self, outcomes: Iterable[Encoded | SampleError]) -> None:
        """Count samples in the log; raise the first error that is not to be skipped, and warn of the first skipped."""
        skipped: list[SampleError] = []
        with self.skip_log.at_once():
            for outcome in outcomes:
                if isinstance(outcome, Encoded):
                    self.skip_log.use(truncated=int(outcome.num_cut > 0))
                elif self._is_fatal(outcome):
                    self.skip_log.note(outcome)
                    raise outcome
                elif self.leaves_out(outcome.reason):
                    self.skip_log.note(outcome)
                else:
                    skipped.append(outcome)
                    self.skip_log.refuse(outcome)
        if skipped and self.skip_log.path is None and self.skip_log.is_first("skipped"):
            warnings.warn(
                f"{skipped[0]} ({skipped[0].reason}). It is left out (on_bad='skip'), and so are others like it: their "
                "number is collator.skip_log.refused, by reason collator.skip_log.reasons, and "
                "skip_log='refused.jsonl' writes each down; this is said once",
                SkippedWarning,
                stacklevel=4,
            )

    def _outcome(self, make: Callable[[], Encoded]) -> Encoded | SampleError:
        """Return a sample or its error, without the traceback, whose frames keep all their variables alive.

        An error that is skipped loses its cause too, which has a traceback of its own.
        """
        try:
            return make()
        except SampleError as error:
            if not self._is_fatal(error):
                error.__cause__ = error.__context__ = None
            return error.with_traceback(None)

    def _is_fatal(self, outcome: Encoded | SampleError) -> bool:
        return isinstance(outcome, SampleError) and self.on_bad == "raise" and not self.leaves_out(outcome.reason)


def _to_refusal(error: Exception) -> Refusal:
    """Turn an error of a sample into a refusal. Unforeseen errors keep their name and their place in this package."""
    if isinstance(error, Refusal):
        return error
    if isinstance(error, RecursionError):
        return Refusal("bad_row", "it is nested too deeply to be read; give lists and mappings of a few levels")
    if isinstance(error, MemoryError):
        fault = f"the memory does not suffice for it ({error or 'MemoryError'})"
        return Refusal("out_of_memory", f"{fault}; make its images smaller, or lower ImageLimits.max_pixels")
    frame = [frame for frame in extract_tb(error.__traceback__) if _PACKAGE in Path(frame.filename).parents][-1]
    place = f"{Path(frame.filename).name}, line {frame.lineno}, in {frame.name}"
    return Refusal("unexpected", f"{type(error).__name__}: {error} ({place}); look at what its columns hold there")


def _with_id(sample: Encoded, index: int) -> Encoded:
    """Set the place as the id of a sample without one."""
    return sample if sample.sample_id is not None else replace(sample, sample_id=index)


def sample_id_of(feature: Any) -> int | str | None:
    """Return the id in a sample's columns (`id` or `sample_id`); None: it has none."""
    if not isinstance(feature, Mapping):
        return None
    value = feature.get("id") if feature.get("id") is not None else feature.get("sample_id")
    return value if value is None or isinstance(value, int | str) else str(value)


def channel_of(feature: Any) -> str | None:
    """Return the name of a sample's data set, in its column `channel`; None: it has none."""
    channel = feature.get(CHANNEL_COLUMN) if isinstance(feature, Mapping) else None
    return channel if isinstance(channel, str) else None


def _check_lengths(layout: BatchLayout, slots: SlotRule | None, max_length: int | None, overlength: Overlength) -> None:
    if slots is not None:
        check_kind("slots", slots, SlotRule, "SlotRule(multiple=4)")
    if layout == "padded" and slots is not None:
        raise ConfigError("slots are of packed rows, but layout='padded'; give StepConfig(slots=...) to enable_packing")
    if max_length is None and overlength != "error":
        raise ConfigError(f"overlength={overlength!r} needs max_length=, the most tokens a sample may have")
    if max_length is not None:
        check_whole_number("max_length", max_length, at_least=2)


def _ignored_keys(keys: Collection[str]) -> tuple[str, ...]:
    if isinstance(keys, str) or not all(isinstance(key, str) for key in keys):
        raise ConfigError(f"ignored_keys={keys!r} must be names of keys, such as ('id', 'timestamp')")
    if needed := {"role", "content", "from", "value", "type", "text"}.intersection(keys):
        raise ConfigError(f"ignored_keys={keys!r} would leave {', '.join(sorted(needed))} out, which messages need")
    return tuple(keys)


def _sharing(share_prefixes: bool | SharePrefixes, layout: BatchLayout, slots: SlotRule) -> SharePrefixes | None:
    """Return how samples share prefixes; None: not at all.

    Raises:
        ConfigError: it is neither, or the layout has no place for a tree.
    """
    if not share_prefixes:
        return None
    sharing = SharePrefixes() if share_prefixes is True else share_prefixes
    check_kind("share_prefixes", sharing, SharePrefixes, "SharePrefixes(min_shared=64)")
    if layout != "packed":
        raise ConfigError(f"share_prefixes makes rows, but layout={layout!r}; choose layout='packed'")
    if slots != SlotRule():
        raise ConfigError(f"share_prefixes needs a row without padding, but slots={slots}; leave one of them out")
    return sharing
