"""Collate sample dicts into one batch for a DataLoader, HF Trainer or TRL (`VLMCollator`)."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from traceback import extract_tb
from typing import Any, Literal, get_args

import torch

from vlmpack.collate.assemble import SharePrefixes, check_alike, to_packed, to_padded
from vlmpack.collate.buffers import NotFinite, PixelBuffers, is_finite
from vlmpack.collate.encode import Encoder
from vlmpack.collate.encoded import Encoded, TrainOn, check_labels_are_ids, fit
from vlmpack.collate.media import BatchMedia
from vlmpack.collate.processor_metadata import parts_of, read_processor
from vlmpack.collate.skipped import SkipLimit, SkipLog
from vlmpack.collate.video import FrameSampling, VideoReader
from vlmpack.data.formats import channel_of, sample_id_of
from vlmpack.data.images import ImageLimits
from vlmpack.data.messages import Markers
from vlmpack.data.videos import VideoLimits
from vlmpack.errors import (
    ConfigError,
    SampleError,
    SkippedWarning,
    VlmpackError,
    check_choice,
    check_kind,
    check_whole_number,
)
from vlmpack.layout.batch import PaddedBatch
from vlmpack.layout.row import PackedRow
from vlmpack.layout.segments import SlotRule, round_up
from vlmpack.plan.lengths import OVERLENGTH, Overlength

_PACKAGE = Path(__file__).parent

BatchLayout = Literal["padded", "packed"]
OnBad = Literal["raise", "skip"]


class VLMCollator:
    """Collate samples into a padded batch or a packed row, after checking each sample on its own.

    Args:
        processor: the unmodified processor of a model of any supported family; for a text model, its tokenizer.
        layout: "padded" returns [B, S] with a 2D attention mask, "packed" returns one row [1, T]. Both carry the
            sample lengths on the host.
        slots: the padding of samples and of the row in the packed layout; None: no padding. With `share_prefixes`, only
            `row_multiple` (for context parallelism), which pads the rows whose samples share nothing.
        share_prefixes: in a packed row, compute the prefix that samples share (images included) only once; the row
            gets a `PrefixTree`. True means `SharePrefixes()`. Labels must be token ids.
        max_length: the largest number of tokens in a sample; None: no limit.
        overlength: what to do with a longer sample. "error" refuses it as a bad sample. "drop" leaves it out and counts
            it. "truncate" keeps its first tokens and "truncate_start" its last ones. A medium, or the end tokens of an
            answer, that the limit would split are removed whole. `skip_log.truncated` counts truncated samples.
        train_on: "assistant" trains on the assistant's turns, including their end-of-turn tokens (for prompt and
            completion: the completion only). "last" trains on the last assistant turn only. "all" trains on everything
            except media tokens. Tokenized samples keep their own labels.
        add_stop: a special token of the tokenizer, such as "</s>", to append after a sample's last answer and train on
            if the chat template writes no end token there. None: append nothing, and warn once about a missing one.
        ignored_keys: keys to drop from messages and their parts. A sample with any other key that the chat template
            does not write is refused.
        markers: the meaning of `<image>`, `<video>` and `<audio>` in a text. "auto": placeholders if the sample has a
            column for that kind of media, plain text otherwise. "places": always placeholders; a sample without the
            media is refused. "text": always plain text.
        on_bad: "raise" stops at the first bad sample; "skip" leaves it out, counts it and logs it.
        skip_log: path of a JSON Lines file that lists refused samples. None: only count them, and issue a
            `SkippedWarning` at the first one.
        skip_limit: the number of skipped samples above which the run stops; None: `SkipLimit()`.
        limits: size limits for images, checked against their headers before decoding.
        sampling: how many frames to take from a video file; None: the video processor's own rule.
        video_limits: size limits for video files.
        vocab_size: upper bound (exclusive) for token ids; None: the tokenizer's number of entries.
        pixel_dtype: dtype of the pixels; bfloat16 halves their size. None: the processor's own dtype (float32; bfloat16
            for Llama 4).
        pixel_buffers: the largest number of memory blocks that batches reuse for their pixels. A block is reused once
            nothing refers to it any more. 0: allocate new memory for every batch.

    Raises:
        ConfigError: settings contradict each other.
        FamilyError: the processor belongs to an unsupported family.
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
            raise ConfigError(f"pixel_dtype={pixel_dtype} would round normalized pixels to integers; use a float type")
        for name, setting, kind, such_as in (
            ("skip_limit", skip_limit, SkipLimit, "SkipLimit(max_bad_fraction=0.05)"),
            ("sampling", sampling, FrameSampling, "FrameSampling(fps=1.0)"),
            ("video_limits", video_limits, VideoLimits, "VideoLimits(max_frames=10_000)"),
        ):
            if setting is not None:
                check_kind(name, setting, kind, such_as)
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
        self.videos = VideoReader(
            processor=processor,
            metadata=self.metadata,
            limits=self.limits,
            sampling=sampling,
            file_limits=video_limits or VideoLimits(),
        )
        self.skip_log = SkipLog(skip_log, limit=skip_limit)
        """Counts of received, used and refused samples, by reason."""
        self.encoder = Encoder(
            processor=processor,
            metadata=self.metadata,
            limits=self.limits,
            train_on=train_on,
            markers=markers,
            log=self.skip_log,
            max_length=max_length,
            truncates_start=overlength == "truncate_start",
            videos=self.videos,
            add_stop=add_stop,
            ignored_keys=self.ignored_keys,
        )

    def __repr__(self) -> str:
        names = ("layout", "slots", "share_prefixes", "max_length", "overlength", "train_on", "on_bad", "skip_log")
        values = ((name, getattr(self, name)) for name in names)
        changed = (f"{name}={value!r}" for name, value in values if value not in (None, SlotRule()))
        return f"VLMCollator({type(self.processor).__name__}, {', '.join(changed)})"

    def __call__(self, features: Sequence[Mapping[str, Any] | SampleError]) -> dict[str, Any]:
        """Collate samples into a dict for `model(**batch)`, with the host metadata under the key "vlmpack"."""
        return self.collate(features).to_hf()

    def collate(self, features: Sequence[Mapping[str, Any] | SampleError]) -> PaddedBatch | PackedRow:
        """Collate samples into a batch object. A feature may be an error, which `OpenDataset` returns for a bad row.

        `metadata.sample_ids` names the samples in the batch by their `id` or `sample_id`, or by their index in
        `features`. It is empty if every sample was refused or `features` is empty (an empty row of a sampler). The
        batch then holds one tiny filler image without targets (`num_targets` 0), so that this rank still takes its
        step.

        Raises:
            SampleError: a sample cannot be used and `on_bad` is "raise". The error names the sample and the remedy.
            ConfigError: more samples were refused than the skip limit allows.
            LayoutError: the samples do not fit the fixed sizes of `slots`.
        """
        if isinstance(features, Mapping):
            raise ConfigError("collate makes a batch of a list of samples, got one sample: give [sample]")
        media = BatchMedia()
        return self._assemble(partial(self._encoded, feature, index, media) for index, feature in enumerate(features))

    def measure(self, feature: Mapping[str, Any], index: int | None = None) -> Encoded:
        """Encode a sample without its pixels: token ids, labels, and each image's grid, computed from its header.

        The result is what `collate` would produce, `max_length` included, in a small part of the time. Damage that an
        image's header does not show is found later, by `decode`. The log of skipped samples does not count this sample.

        Args:
            feature: a sample dict.
            index: its index in the dataset, used in errors, and as its id if it has none.

        Raises:
            SampleError: the sample cannot be used, whatever `on_bad` says.
            ConfigError: this processor cannot measure images without decoding them.
        """
        sample = self._checked(feature, index, lambda: self._fitted(self.encoder.measure(feature)))
        return sample if index is None else _with_id(sample, index)

    def text_parts(self, feature: Mapping[str, Any], index: int | None = None) -> list[tuple[str, bool]]:
        """Return the text of a sample as the model gets it, in parts: (text, whether it is trained on).

        A run of media tokens is one part, such as "<|image_pad|> x 220". Arguments and errors are those of `measure`.
        """
        sample, tokenizer = self.measure(feature, index), parts_of(self.processor).tokenizer
        kinds = zip((sample.types != 0).tolist(), (sample.labels >= 0).tolist(), sample.input_ids.tolist(), strict=True)
        parts = []
        for (is_media, is_target), group in groupby(kinds, key=itemgetter(0, 1)):
            ids = [token for *_, token in group]
            parts.append(
                (f"{tokenizer.decode(ids[0])} x {len(ids):,}" if is_media else tokenizer.decode(ids), is_target)
            )
        return parts

    def length(self, feature: Mapping[str, Any]) -> int:
        """Return a sample's padded length in a row, from `measure`. Serves as the `length` of a `PackedStream`.

        A sample that `collate` leaves out gets the smallest padded length, so that a stream still passes it on and
        `collate` can count it.

        Raises:
            SampleError, ConfigError: as in `measure`, but SampleError only if `on_bad` is "raise".
        """
        outcome = self._outcome(lambda: self.measure(feature))
        if isinstance(outcome, SampleError) and self._is_fatal(outcome):
            raise outcome
        return round_up(outcome.num_tokens if isinstance(outcome, Encoded) else 1, self.slots.multiple)

    def decode(self, samples: Sequence[Encoded]) -> PaddedBatch | PackedRow:
        """Collate samples that `measure` returned: read their media and split them into patches.

        The result equals `collate` of the same samples. `on_bad` decides what happens to a sample whose media cannot be
        used or have changed since. Media that truncation removed are not read.

        Raises:
            SampleError, ConfigError, LayoutError: as in `collate`.
        """
        media = BatchMedia()
        return self._assemble(partial(self._decoded, sample, index, media) for index, sample in enumerate(samples))

    def leaves_out(self, reason: str) -> bool:
        """Return whether a setting drops samples refused for this reason, so that they do not count as bad."""
        return reason == OVERLENGTH and self.overlength == "drop"

    def _assemble(self, makers: Iterable[Callable[[], Encoded]]) -> PaddedBatch | PackedRow:
        """Join the usable samples into a batch, then count all samples in their order."""
        outcomes: list[Encoded | SampleError] = []
        for make in makers:
            outcomes.append(self._outcome(make))
            if self._is_fatal(outcomes[-1]):
                self._count(outcomes)  # raises
        check_alike(outcomes, self.encoder.family)
        batch = self._lay_out(outcomes)
        self._count(outcomes)
        return batch

    def _lay_out(self, outcomes: list[Encoded | SampleError]) -> PaddedBatch | PackedRow:
        """Join samples into a batch. Samples with non-finite pixels become errors in `outcomes`."""
        usable = [(at, sample) for at, sample in enumerate(outcomes) if isinstance(sample, Encoded)]
        samples = [_with_id(sample, at) for at, sample in usable] or [self.encoder.filler]
        to_row = partial(to_packed, rule=self.slots, sharing=self.share_prefixes)
        to_batch = to_row if self.layout == "packed" else to_padded
        further = {"pixel_dtype": self.pixel_dtype, "buffers": self.buffers, "family": self.encoder.family}
        try:
            return self._typed(to_batch(samples, pad_token_id=self.metadata.pad_token_id, **further))
        except NotFinite:
            for at, sample in usable:
                broken = {
                    kind for kind, media in sample.media.items() for x in media if not all(map(is_finite, x.values))
                }
                if broken:
                    message = "its pixels hold NaN or infinity; the image is broken or was normalized by 0"
                    if "audio" in broken:
                        message = "its input_features hold NaN or infinity; the audio is broken"
                    named = {"index": at, "reason": "pixels_not_finite", "sample_id": sample.sample_id}
                    outcomes[at] = SampleError(message, **named)
        return self._lay_out(outcomes)

    def _typed(self, batch: PaddedBatch | PackedRow) -> PaddedBatch | PackedRow:
        """Add the token types that some families need.

        The processor computes the types by which experts are chosen. A padded batch also gets its token types under the
        argument name of the unmodified model, if that is another one than `mm_token_type_ids`.
        """
        if (family := self.encoder.family) is None:
            return batch
        extras = dict(batch.extras)
        if family.expert_types is not None:
            types = self.processor.create_moe_mm_token_type_ids(batch.input_ids.numpy())
            extras[family.expert_types] = torch.from_numpy(types)
        if isinstance(batch, PaddedBatch) and family.token_types not in (None, "mm_token_type_ids"):
            assert batch.mm_token_type_ids is not None
            extras[family.token_types] = batch.mm_token_type_ids
        return replace(batch, extras=extras) if extras != batch.extras else batch

    # ------------------------------------------------------------------ one sample

    def _encoded(self, feature: Mapping[str, Any] | SampleError, index: int, media: BatchMedia) -> Encoded:
        if isinstance(feature, SampleError):
            place = feature.index if feature.sample_id is None else feature.sample_id
            raise SampleError(feature.detail, index=index, reason=feature.reason, sample_id=place) from feature
        return self._checked(feature, index, lambda: self._fitted(self.encoder.encode(feature, media)))

    def _decoded(self, sample: Encoded, index: int, media: BatchMedia) -> Encoded:
        named = {} if sample.sample_id is None else {"id": sample.sample_id}
        return self._checked(named, index, lambda: self.encoder.media.decode(self._sharable(sample), media))

    def _fitted(self, sample: Encoded) -> Encoded:
        return fit(self._sharable(sample), self.metadata, max_length=self.max_length, overlength=self.overlength)

    def _sharable(self, sample: Encoded) -> Encoded:
        if self.share_prefixes is not None:
            check_labels_are_ids(sample)
        return sample

    def _checked(self, feature: Mapping[str, Any], index: int | None, make: Callable[[], Encoded]) -> Encoded:
        """Make a sample and give it the id in `feature`. Raise a refusal as an error that names the sample."""
        sample_id = None
        try:
            sample_id, channel = sample_id_of(feature), channel_of(feature)
            sample = make()
        except Exception as error:  # a dataset may hold anything
            if isinstance(error, VlmpackError) and not isinstance(error, SampleError):
                raise
            raise _named(_as_sample_error(error), index, sample_id) from error
        names = {"sample_id": sample_id, "channel": sample.channel if channel is None else channel}
        is_named = (sample.sample_id, sample.channel) == tuple(names.values())
        return sample if is_named else replace(sample, **names)

    # ------------------------------------------------------------------ counts

    def _count(self, outcomes: Iterable[Encoded | SampleError]) -> None:
        """Count samples in the log, raise the first fatal error, and warn about the first skipped sample."""
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
                f"{skipped[0]} ({skipped[0].reason}). It is left out (on_bad='skip'). collator.skip_log counts such "
                "samples by reason, and skip_log='refused.jsonl' lists them. This warning is given once",
                SkippedWarning,
                stacklevel=4,
            )

    def _outcome(self, make: Callable[[], Encoded]) -> Encoded | SampleError:
        """Return a sample or its error, without the traceback, whose frames would keep all their variables alive.

        A skipped error also loses its cause, which has its own traceback.
        """
        try:
            return make()
        except SampleError as error:
            if not self._is_fatal(error):
                error.__cause__ = error.__context__ = None
            return error.with_traceback(None)

    def _is_fatal(self, outcome: Encoded | SampleError) -> bool:
        return isinstance(outcome, SampleError) and self.on_bad == "raise" and not self.leaves_out(outcome.reason)


def _named(error: SampleError, index: int | None, sample_id: int | str | None) -> SampleError:
    """Name the sample in an error; without an index, in its text."""
    if index is None and sample_id is not None:
        error = error.within(f"sample {sample_id!r}")
    return error.of_sample(index, sample_id)


def _as_sample_error(error: Exception) -> SampleError:
    """Turn any error into that of a sample. An unforeseen error keeps its name and its location in this package."""
    if isinstance(error, SampleError):
        return error
    if isinstance(error, RecursionError):
        return SampleError("it is nested too deeply to be read; give lists and mappings of a few levels", "bad_row")
    if isinstance(error, MemoryError):
        fault = f"the memory does not suffice for it ({error or 'MemoryError'})"
        return SampleError(f"{fault}; make its images smaller, or lower ImageLimits.max_pixels", "out_of_memory")
    frame = [frame for frame in extract_tb(error.__traceback__) if _PACKAGE in Path(frame.filename).parents][-1]
    place = f"{Path(frame.filename).name}, line {frame.lineno}, in {frame.name}"
    return SampleError(f"{type(error).__name__}: {error} ({place}); look at what its columns hold there", "unexpected")


def _with_id(sample: Encoded, index: int) -> Encoded:
    """Use the index as the id of a sample without one."""
    return sample if sample.sample_id is not None else replace(sample, sample_id=index)


def _check_lengths(layout: BatchLayout, slots: SlotRule | None, max_length: int | None, overlength: Overlength) -> None:
    if slots is not None:
        check_kind("slots", slots, SlotRule, "SlotRule(multiple=4)")
    if layout == "padded" and slots is not None:
        raise ConfigError("slots are of packed rows, but layout='padded'; give StepConfig(slots=...) to enable_packing")
    if overlength == "own_row":
        raise ConfigError("overlength='own_row' is for rows: plan_bins, RowSettings and StoreSettings take it")
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
    """Return the settings for shared prefixes, or None if samples share nothing.

    Raises:
        ConfigError: `share_prefixes` has the wrong type, or the layout or `slots` do not allow a prefix tree.
    """
    sharing = SharePrefixes.of(share_prefixes)
    if sharing is None:
        return None
    if layout != "packed":
        raise ConfigError(f"share_prefixes makes rows, but layout={layout!r}; choose layout='packed'")
    if slots != SlotRule(row_multiple=slots.row_multiple):
        fault = f"share_prefixes needs a row without padding, but slots={slots}"
        raise ConfigError(f"{fault}; leave one of them out, or give row_multiple alone")
    return sharing
