"""Encode one sample of any accepted format with the user's own processor: token ids, labels and tensors (`Encoder`).

    template    <start_of_turn>user\n <boi> What is it?<end_of_turn>\n<start_of_turn>model\nA cat<end_of_turn>\n
    expanded    <start_of_turn>user\n \n\n<boi><image><eoi>\n\n What is it?<end_of_turn>...
    tokens      of the expanded text, with each placeholder repeated as often as its image needs
    labels      tokens of the answers and of their ends, but never those of an image

The chat template and the tokenizer are called as in `apply_chat_template(tokenize=True)`, and each image is written as
in `replace_image_token`. Only one placeholder of each run is tokenized; it is repeated afterwards. Images go through
the processor one at a time, because their sizes may differ. Before the first image, a trial sample of two images is
encoded both here and by one call of the whole processor. All tokens and values must be the same.

If the template writes ChatML (`<|im_start|>assistant`), answers are found in the ids. Answers of other templates, and
of ChatML with thoughts, are found in the template's text.
"""

from __future__ import annotations

import re
import warnings
from bisect import bisect_right
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import accumulate
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from PIL import Image

from vlmpack.collate.assemble import join_media
from vlmpack.collate.chat_template import ChatTemplate, Span, check_characters
from vlmpack.collate.encoded import (
    TYPES,
    Encoded,
    TrainOn,
    Visual,
    assistant_spans,
    check_sample,
    make_labels,
    tokens_of,
    weighed,
)
from vlmpack.collate.grounding import with_objects
from vlmpack.collate.media import BatchMedia, MediaReader, trial_image
from vlmpack.collate.processor_metadata import ProcessorMetadata
from vlmpack.collate.skipped import SkipLog
from vlmpack.collate.tokenized import read_tokenized, token_types, with_teacher
from vlmpack.collate.video import VideoReader
from vlmpack.data.formats import KINDS, Kind, is_empty
from vlmpack.data.images import ImageLimits
from vlmpack.data.messages import (
    SPEAKING,
    Conversation,
    Markers,
    MediaRef,
    Weights,
    check_unread,
    is_trained,
    read_conversation,
    text_of,
)
from vlmpack.errors import FamilyError, SampleError
from vlmpack.families.family import Family
from vlmpack.families.registry import family_of_processor

TOKEN_NAMES = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids", "labels")
"""Outputs of a processor with one entry per token; all other outputs belong to images."""
_TRIAL = ((120, 90), (70, 260))
"""Heights and widths of the images in the trial sample."""
_SMALLEST = (64, 64)
"""Width and height of the image in a batch without samples, and of blank images."""
_TILED = (800, 1100)
"""Width and height of an image that is split into tiles."""
_NUMBERS = re.compile(r"\d+")

Visuals = Mapping[Kind, Sequence[Visual]]
"""The media of a sample by kind, each in the order of their placeholders."""


def _no_tokens() -> np.ndarray:
    return np.zeros(0, np.int64)


@dataclass(frozen=True, kw_only=True, eq=False)
class Tokens:
    """The n tokens of a text with expanded media. The text has one placeholder per run, the tokens have them all."""

    ids: np.ndarray = field(default_factory=_no_tokens)
    """int64 [n]."""
    text: str = ""
    """The expanded text."""
    starts: np.ndarray = field(default_factory=_no_tokens)
    """int64 [n]: first character of each token. An empty token gets the end of the previous one. Empty: not needed."""
    stops: np.ndarray = field(default_factory=_no_tokens)
    """int64 [n]: the character after each token. Empty: not needed."""
    media: Visuals = field(default_factory=dict)
    """The media by kind, each in the order of their placeholders."""
    spans: tuple[Span, ...] = ()
    """Characters of each medium in the expanded text."""
    places: tuple[Span, ...] = ()
    """Characters of each medium's placeholder in the text before expansion."""

    def moved(self, at: int) -> int:
        """Convert a character position in the text before expansion to one in the expanded text."""
        gained = [0, *(span[1] - place[1] for span, place in zip(self.spans, self.places, strict=True))]
        return at + gained[bisect_right([stop for _, stop in self.places], at)]

    def between(self, span: Span) -> slice:
        """Return the tokens of these characters of the expanded text, including tokens that only overlap them."""
        start = int(np.searchsorted(self.stops, span[0], side="right"))
        return slice(start, max(start, int(np.searchsorted(self.starts, span[1]))))

    def followed_by(self, other: Tokens) -> Tokens:
        """Append the tokens of a text without media."""
        gap = len(self.text)
        return replace(
            self,
            ids=np.concatenate((self.ids, other.ids)),
            starts=np.concatenate((self.starts, other.starts + gap)),
            stops=np.concatenate((self.stops, other.stops + gap)),
            text=self.text + other.text,
        )


@dataclass(frozen=True, kw_only=True)
class Encoder:
    """Encodes samples to `Encoded`, with the ids and tensors that `processor(text=..., images=...)` would give."""

    processor: Any
    """The processor, or the tokenizer of a text model."""
    metadata: ProcessorMetadata
    """Its metadata."""
    limits: ImageLimits
    """Size limits for images and frames."""
    train_on: TrainOn
    """Which tokens are trained on."""
    markers: Markers = "auto"
    """The meaning of `<image>`, `<video>` and `<audio>` in a text."""
    log: SkipLog = field(default_factory=SkipLog)
    """Knows what was warned of already."""
    max_length: int | None = None
    """Media beyond this number of tokens are not processed, since no sample can hold them; None: no limit."""
    truncates_start: bool = False
    """True: overlong samples keep their end and lose their first media. False: they lose their last media."""
    videos: VideoReader | None = None
    """Reads videos; None: by the processor's own settings."""
    add_stop: str | None = None
    """Token to append after the last answer if the template does not end it with one; None: none."""
    ignored_keys: Collection[str] = ()
    """Keys to drop from messages and their parts."""

    def encode(self, feature: Any, batch: BatchMedia | None = None) -> Encoded:
        """Encode and check one sample. Media that are already in `batch` are not processed again.

        Raises:
            SampleError: the sample cannot be used.
            ConfigError: no sample can be used with this processor.
        """

        limit = None if self.truncates_start else self.max_length
        return self._encode(feature, partial(self.media.load_each, batch=batch, max_tokens=limit))

    def measure(self, feature: Any) -> Encoded:
        """Encode and check one sample without pixels: images and videos are only measured.

        Raises:
            SampleError: the sample cannot be used, as far as can be told without decoding its media.
            ConfigError: this processor cannot be used at all, or cannot measure images.
        """
        return self._encode(feature, self.media.measure_each)

    def images(self, refs: Sequence[MediaRef], *, is_measured: bool = False) -> tuple[tuple[Visual, np.ndarray], ...]:
        """Read the images of a sample whose text is already ids.

        Args:
            refs: the images.
            is_measured: only measure them, from their headers.

        Returns:
            Each image, and the ids that the processor writes in place of its placeholder, int64 [n].

        Raises:
            SampleError: an image cannot be used.
            FamilyError, ConfigError: no sample can be used with this processor.
        """
        visuals = (self.media.measure_each if is_measured else self.media.load_each)(refs)
        assert not visuals or self._is_confirmed
        token, tokenizer = self.metadata.image_token, self.media.parts.tokenizer
        found = []
        for visual, text in zip(visuals, self.media.texts_of(visuals, token * len(visuals), token), strict=True):
            ids = np.asarray(tokenizer(text, add_special_tokens=False)["input_ids"], np.int64)
            found.append((visual, np.repeat(ids, self._repeats(ids, {"image": (visual,)}))))
        return tuple(found)

    def read(self, feature: Mapping[str, Any]) -> Conversation:
        """Read a sample of any format, without its media's content.

        Raises:
            SampleError: its columns contradict each other.
        """
        return read_conversation(
            feature,
            has_vision=self.metadata.has_vision,
            has_audio=self.metadata.has_audio,
            markers=self.markers,
            ignored_keys=self.ignored_keys,
        )

    @cached_property
    def media(self) -> MediaReader:
        """Reads and measures media."""
        videos = self.videos or VideoReader(processor=self.processor, metadata=self.metadata, limits=self.limits)
        return MediaReader(processor=self.processor, metadata=self.metadata, limits=self.limits, videos=videos)

    @cached_property
    def filler(self) -> Encoded:
        """The sample for a batch without samples: a small black image, or one text token, without targets.

        A rank that skips a step would block the others in the next collective. With this sample, it runs forward and
        backward through every part of the model, with a loss of 0.
        """
        metadata = self.metadata
        if not metadata.has_vision:
            return self._sample(Tokens(ids=np.array([metadata.pad_token_id], np.int64)), [])
        text = self._laid_out(f"{metadata.vision_start}{metadata.image_token}{metadata.vision_end}", 1)
        side = metadata.patch_size * metadata.merge_size
        size, options = (_SMALLEST, {}) if metadata.by_processor else ((side, side), {"do_resize": False})
        images = self.media.process([Image.new("RGB", size)], **options)
        return self._sample(self._tokenize(text, {"image": images}), [])

    @cached_property
    def _template(self) -> ChatTemplate:
        return ChatTemplate(
            processor=self.processor, metadata=self.metadata, add_stop=self.add_stop, is_first=self.log.is_first
        )

    # ------------------------------------------------------------------ a sample

    def _encode(self, feature: Any, read: Callable[..., Sequence[Visual]]) -> Encoded:
        if not isinstance(feature, Mapping):
            raise SampleError(f"a sample must be a mapping of columns, got a {type(feature).__name__}", "bad_row")
        if feature.get("input_ids") is not None:
            sample = self._tokenized(feature)
            made = self.family.expert_types if self.family else None  # token types by which experts are chosen
            has_media = any(sample.media.values()) or not self.metadata.has_vision
            named = {name: feature[name] for name in feature if name != made}
            self._warn_of_unread(check_unread(named, has_media=has_media))
        else:
            conversation = self.read(feature)
            if self.train_on == "last":
                conversation = _last_alone(conversation)
            if self.train_on != "all":
                _check_answered(conversation)
            self._warn_of_unread(conversation.unread)
            sample = self._encode_conversation(conversation, read)
            if conversation.unplaced and self.log.is_first(f"marker of {conversation.unplaced[0]}"):
                kind, marker = conversation.unplaced
                seen = f"a user's text holds {marker!r}, read as text: its sample has no column {kind} or {kind}s"
                warnings.warn(f"{seen}. Choose markers='places' to refuse such samples, or 'text'", stacklevel=2)
            sample = with_teacher(sample, feature, num_tokens=sample.num_tokens)
        check_sample(sample, self.metadata)
        return sample

    def _warn_of_unread(self, columns: Sequence[str]) -> None:
        if columns and (new := self.log.name_unread(columns)):
            warnings.warn(f"samples have columns that nothing reads: {', '.join(new)}", stacklevel=2)

    def _tokenized(self, feature: Mapping[str, Any]) -> Encoded:
        """Read a tokenized sample. Token types for experts are computed anew."""
        if self._columns:
            raise SampleError(f"it has input_ids, but {self._is_of_prefix}, and images", "bad_row")
        sample = read_tokenized(feature, self.metadata, train_on=self.train_on)
        if self.metadata.has_audio:
            sample = replace(sample, audios=self.media.audio.read_tokenized(feature))
        return sample

    def _encode_conversation(self, conversation: Conversation, read: Callable[..., Sequence[Visual]]) -> Encoded:
        self._check_texts(conversation)
        num_images, num_videos = len(conversation.media["image"]), len(conversation.media["video"])
        if (num_images or num_videos) and not self.metadata.has_vision:
            seen = f"it has {num_images} image(s) and {num_videos} video(s), but a tokenizer reads text only"
            raise SampleError(f"{seen}; give VLMCollator the model's processor", "no_vision")
        media: Visuals = {kind: read(conversation.media[kind]) for kind in KINDS}
        if media["image"]:
            assert self._is_confirmed
        if conversation.objects is not None:
            named = {"name": type(self.processor).__name__, "metadata": self.metadata, "limits": self.limits}
            conversation = with_objects(conversation, media["image"], **named)
        return (self._plain if conversation.plain else self._chat)(conversation, media)

    def _chat(self, conversation: Conversation, media: Visuals) -> Encoded:
        if self._columns:
            raise SampleError(f"it is a conversation, but {self._is_of_prefix}", "template_error")
        text = self._template.render(conversation)
        if self.train_on == "all":
            _check_unweighed(conversation)
        if not self.metadata.by_processor and ("</think>" not in text or self.train_on == "all"):
            text += self._template.end_of(conversation, text)
            tokens = self._tokenize(text, media, has_offsets=any(len(pieces) > 1 for pieces in conversation.weights))
            if self._is_too_long(tokens):
                tokens = self._tokenize(text, media, has_offsets=True)
            spans, ends = self._spans(tokens.ids, conversation), []
        else:
            answers = [] if self.train_on == "all" else self._template.answers(conversation, text)
            trained = [span for span, pieces in zip(answers, conversation.weights, strict=False) if is_trained(pieces)]
            if end := self._template.end_of(conversation, text, None if self.train_on == "all" else trained):
                text += end
                answers[-1:] = [(start, len(text)) for start, _ in answers[-1:]]
            tokens = self._tokenize(self._laid_out(text, len(media["image"]), is_chat=True), media, has_offsets=True)
            spans = [self._answer(tokens, span) for span in answers]
            ends = [self._answer(tokens, (self._template.stop_of(text, span), span[1])) for span in answers]
        weights_n = _weights(tokens, spans, conversation)
        return self._sample(tokens, spans, ends=ends, weights=weights_n)

    def _is_too_long(self, tokens: Tokens) -> bool:
        return self.max_length is not None and len(tokens.ids) > self.max_length

    def _plain(self, conversation: Conversation, media: Visuals) -> Encoded:
        """Tokenize prompt and completion separately, as in generation. The completion and its end are the target."""
        assert conversation.plain is not None
        prompt, completion = self._marked(conversation.plain[0], media), conversation.plain[1]
        if self._columns and not media["image"]:
            name = type(self.processor).__name__
            raise SampleError(f"a {name} writes no prompt without an image, and it has none; leave it out", "bad_row")
        if not completion.rstrip().endswith(self.metadata.eos_token):
            completion += self.metadata.eos_token
        may_cut = self.max_length is not None
        before = self._tokenize(self._laid_out(prompt, len(media["image"])), media, has_offsets=may_cut)
        tokens = before.followed_by(self._tokenize(completion, {}, is_continued=True, has_offsets=may_cut))
        return self._sample(tokens, [slice(len(before.ids), None)])

    def _sample(
        self,
        tokens: Tokens,
        answers: Sequence[slice],
        *,
        ends: Sequence[slice] = (),
        weights: np.ndarray | None = None,
    ) -> Encoded:
        """Label a sample: its answers, or everything, except media, the tokens around them and the first token.

        If the sample is too long, note what truncation must keep whole: its media and the `ends` of answers. `weights`:
        float32 [n], one per token; None: all 1.
        """
        ids, metadata = tokens.ids, self.metadata
        visuals: dict[str, Any] = {f"{kind}s": tuple(each) for kind, each in tokens.media.items()}
        around = self._around_media(tokens) if len(tokens.starts) else []
        spans = None if self.train_on == "all" else [(answer.start, answer.stop) for answer in answers]
        in_answer = np.arange(len(ids)) >= (answers[0].start if answers else len(ids))
        whole = (*around, *ends) if self._is_too_long(tokens) else ()
        sample = Encoded(
            input_ids=ids,
            labels=make_labels(ids, metadata, spans=spans, untrained=around if metadata.by_processor else ()),
            types=token_types(ids, metadata),
            **visuals,
            columns=dict.fromkeys(self._columns, in_answer.astype(np.int64)),
            whole=tuple((kept.start, kept.stop) for kept in whole),
        )
        return weighed(sample, weights)

    # ------------------------------------------------------------------ answers

    def _spans(self, ids: np.ndarray, conversation: Conversation) -> list[slice]:
        """Return the tokens of answers in ChatML."""
        if self.train_on == "all":
            return []
        spans = assistant_spans(ids, self.metadata)
        count = sum(message["role"] == "assistant" for message in conversation.messages)
        if len(spans) != count:
            fault = f"the chat template wrote {len(spans) or 'no'} '<|im_start|>assistant' turns for {count} assistant"
            remedy = "use a ChatML template, train_on='all', or tokenized samples with labels"
            raise SampleError(f"{fault} messages; {remedy}", "turn_mismatch")
        return [slice(*span) for span in spans]

    def _answer(self, tokens: Tokens, span: Span) -> slice:
        """Return the tokens of an answer in the template's text.

        A token that starts before the answer counts if it only contains blanks of the header, or if the template marks
        answers itself (as in transformers). A token that ends after the answer counts if it only contains blanks of
        the following text: in LLaVA's "4 USER:", the token " US" does not count.
        """
        start, stop = tokens.moved(span[0]), tokens.moved(span[1])
        hit = tokens.between((start, stop))
        if hit.start == hit.stop:
            return hit
        before = tokens.text[tokens.starts[hit.start] : start].strip(" ")
        behind = tokens.text[stop : tokens.stops[hit.stop - 1]].strip()
        return slice(hit.start + bool(before and not self._template.marks_answers), hit.stop - bool(behind))

    def _around_media(self, tokens: Tokens) -> list[slice]:
        """Return the tokens of each medium, including the template's tokens around it."""
        ids, (start, end), slices = tokens.ids.tolist(), self._borders, []
        for span in tokens.spans:
            hit = tokens.between(span)
            before, after = max(hit.start - len(start), 0), hit.stop + len(end)
            first = before if ids[before : hit.start] == start else hit.start
            slices.append(slice(first, after if ids[hit.stop : after] == end else hit.stop))
        return slices

    @cached_property
    def _borders(self) -> tuple[list[int], list[int]]:
        """Ids of the texts that templates write before and after an image."""
        tokenizer, metadata = self.media.parts.tokenizer, self.metadata
        start, end = (
            tokenizer.encode(text, add_special_tokens=False) for text in (metadata.vision_start, metadata.vision_end)
        )
        return start, end

    # ------------------------------------------------------------------ tokens

    def _tokenize(self, text: str, media: Visuals, *, is_continued: bool = False, has_offsets: bool = False) -> Tokens:
        """Expand the placeholders of a text, tokenize it, and repeat each placeholder as often as its medium needs.

        Args:
            text: a text with one placeholder per medium.
            media: the media, in order.
            is_continued: True for a text that follows another one and gets no beginning-of-text token.
            has_offsets: also find the characters of each token; always done if the processor encodes samples itself.

        Raises:
            SampleError: the number of placeholders is wrong (`placeholder_mismatch`), or the text holds half a
                surrogate pair (`bad_text`).
        """
        check_characters(text)
        expanded = self._expand(text, media)
        tokenizer = self.media.parts.tokenizer
        begins = tokenizer.bos_token is not None and text.startswith(tokenizer.bos_token)
        options = {"add_special_tokens": False} if begins or is_continued else self._text_options
        has_offsets = has_offsets or self.metadata.by_processor
        out = tokenizer(expanded.text, return_offsets_mapping=has_offsets, **options)
        ids = np.asarray(out["input_ids"], np.int64)
        repeats = self._repeats(ids, expanded.media)
        columns = {"ids": ids}
        if has_offsets:
            offsets = np.array(out["offset_mapping"], np.int64).reshape(-1, 2)
            is_empty = offsets[:, 0] >= offsets[:, 1]
            ended = np.maximum.accumulate(np.where(is_empty, 0, offsets[:, 1]))
            columns["starts"], columns["stops"] = (np.where(is_empty, ended, offsets[:, at]) for at in (0, 1))
        return replace(expanded, **{name: np.repeat(column, repeats) for name, column in columns.items()})

    @cached_property
    def _text_options(self) -> dict[str, Any]:
        """The processor's choice of special tokens."""
        options = self.media.options["text_kwargs"] if self.metadata.has_vision else {}
        return {name: options[name] for name in ("add_special_tokens",) if name in options}

    def _repeats(self, ids: np.ndarray, media: Visuals) -> np.ndarray:
        """Return how often each token of an expanded text is repeated, int64 [n]: placeholders as their media need."""
        repeats, types = np.ones(len(ids), np.int64), token_types(ids, self.metadata)
        for kind, visuals in media.items():
            needed = [count for visual in visuals for count in tokens_of(visual, self.metadata, kind=kind)]
            if not needed:
                continue
            at = np.flatnonzero(types == TYPES[kind])
            if len(at) != len(needed):
                fault = (
                    f"the tokenizer makes {len(at)} placeholders for {len(needed)} of its {kind}s; use the model's own"
                )
                raise SampleError(fault, "placeholder_mismatch")
            repeats[at] = needed
        return repeats

    def _expand(self, text: str, media: Visuals) -> Tokens:
        """Replace the placeholders of a text by the texts of their media. The result has no ids yet."""
        found: list[tuple[Span, str, Visual]] = []
        for kind, token in self._placeholders:
            visuals = media.get(kind, ())
            places = [match.span() for match in re.finditer(re.escape(token), text)]
            if len(places) != len(visuals):
                counts = f"{len(places)} {kind} placeholder(s) {token!r} for {len(visuals)} {kind}(s)"
                raise SampleError(f"its text has {counts}; write <{kind}> for each {kind}", "placeholder_mismatch")
            found += zip(places, self._written(kind, visuals, text), visuals, strict=True)
        found.sort(key=itemgetter(0))
        expanded, spans, end = "", [], 0
        for (start, stop), written, _ in found:
            expanded += text[end:start]
            spans.append((len(expanded), len(expanded) + len(written)))
            expanded, end = expanded + written, stop
        if self.metadata.frames_as_tiles:
            media = {"image": [visual for *_, visual in found]}
        places = tuple(place for place, *_ in found)
        return Tokens(text=expanded + text[end:], media=media, spans=tuple(spans), places=places)

    def _written(self, kind: Kind, visuals: Sequence[Visual], text: str) -> list[str]:
        """Return the texts that replace the placeholders of a kind.

        Video frames are written as in `Qwen3VLProcessor.replace_video_token`: each frame between vision tokens, after
        its time.
        """
        metadata = self.metadata
        token = {"image": metadata.image_token, "video": metadata.video_token, "audio": metadata.audio_token}[kind]
        if visuals and (kind == "image" or (kind == "video" and metadata.by_processor)):
            return self.media.texts_of(visuals, text, token)
        if kind == "video" and metadata.frame_timestamps:
            frame = f"{metadata.vision_start}{metadata.video_token}{metadata.vision_end}"
            return ["".join(f"<{time:.1f} seconds>{frame}" for time in video.timestamps) for video in visuals]
        return [token] * len(visuals)

    @cached_property
    def _placeholders(self) -> tuple[tuple[Kind, str], ...]:
        """The kinds of media that a text may have, each with its placeholder."""
        metadata = self.metadata
        tokens = (metadata.image_token, metadata.video_token, metadata.audio_token)
        return tuple((kind, token) for kind, token in zip(KINDS, tokens, strict=True) if token)

    def _marked(self, prompt: str, media: Visuals) -> str:
        """Replace `<image>`, `<video>` and `<audio>` in a plain prompt by placeholders, if it has none yet."""
        metadata = self.metadata
        around = {"audio": (metadata.audio_start, metadata.audio_end)}
        for kind, token in self._placeholders:
            if not media[kind] or token in prompt or self.markers == "text":
                continue
            start, end = around.get(kind, (metadata.vision_start, metadata.vision_end))
            prompt = prompt.replace(f"<{kind}>", f"{start}{token}{end}")
        return prompt

    def _laid_out(self, text: str, count: int, *, is_chat: bool = False) -> str:
        """Apply the processor's layout of a text before images are inserted. PaliGemma's adds text around them.

        Raises:
            SampleError: the layout changes a chat template's text, so that the positions of answers would be lost.
        """
        if not count or not self.metadata.by_processor:
            return text
        blank = Image.new("RGB", _SMALLEST)
        laid_out = self.processor.prepare_inputs_layout(images=[[blank] * count], text=[text])[1][0]
        if is_chat and laid_out != text:
            fault = f"the {type(self.processor).__name__} changes the chat template's text, so answers are not found"
            raise SampleError(f"{fault}; give prompt and completion as strings", "template_error")
        return laid_out

    # ------------------------------------------------------------------ special tokens in a sample's own text

    def _check_texts(self, conversation: Conversation) -> None:
        """Refuse a sample whose own text holds the template's tokens: they would make false images or turns.

        Templates that write XML put angle brackets around a name, so there `|im_end|` is as bad as `<|im_end|>`.
        """
        typed = conversation.contents()[1 if conversation.plain else 0 :]
        reserved = self._reserved if conversation.plain is None else self._media_tokens
        for text in (*typed, *(f"<{name}>" for name in conversation.other_texts())):
            if token := next((token for token in reserved if token in text), None):
                fault = f"its text holds {token!r}, which only the processor and the chat template may write; remove it"
                raise SampleError(fault, "reserved_token_in_text")

    @cached_property
    def _reserved(self) -> tuple[str, ...]:
        """Tokens that only the processor or the chat template may write; other special tokens are ordinary text."""
        named = self.media.parts.tokenizer.special_tokens_map
        ends = [str(named[name]) for name in ("bos_token", "eos_token", "pad_token") if name in named]
        return tuple(dict.fromkeys((*self._media_tokens, *self._template.tokens, *ends)))

    @cached_property
    def _media_tokens(self) -> tuple[str, ...]:
        """Special tokens of images, videos and audio: the named ones, and those in the text of an image.

        If one of several tokens that differ only in numbers (rows and columns, for example) is used, all of them count.
        """
        if not (self.metadata.has_vision and self.metadata.by_processor):
            return self.metadata.media_tokens
        (image,) = self.media.process([Image.new("RGB", _TILED)])
        kinds = {_NUMBERS.sub("", token) for token in self.metadata.special_tokens if token in image.written}
        alike = [token for token in self.metadata.special_tokens if _NUMBERS.sub("", token) in kinds]
        return (*self.metadata.media_tokens, *alike)

    # ------------------------------------------------------------------ the processor as a whole

    @cached_property
    def family(self) -> Family | None:
        """The family of the processor; None: a text model's tokenizer."""
        return family_of_processor(self.processor) if self.metadata.has_vision else None

    @property
    def _columns(self) -> tuple[str, ...]:
        """Names of the columns that the model needs beside ids: the column that marks the prompt as prefix."""
        return self.family.token_columns if self.family else ()

    @property
    def _is_of_prefix(self) -> str:
        return f"a {type(self.processor).__name__} takes a prompt and its answer: give prompt and completion as strings"

    @cached_property
    def _is_confirmed(self) -> bool:
        """True once the whole processor has given the same ids and tensors for a sample of two images.

        Raises:
            FamilyError: it gave others. The message names the difference.
        """
        pictures = [trial_image(size) for size in _TRIAL]
        text = f"{self.metadata.image_token}a {self.metadata.image_token} b"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # numpy's, caused by GLM-4V's processor
            whole = self.processor(text=[text], images=[pictures], return_tensors="pt")
        groups = [pictures] if self.metadata.images_together else [[picture] for picture in pictures]
        visuals = [visual for group in groups for visual in self.media.process(group)]
        sample = self._sample(self._tokenize(self._laid_out(text, len(pictures)), {"image": visuals}), [])
        of_images = {name: tensor for name, tensor in whole.items() if name not in TOKEN_NAMES}
        known, made = self.family.media if self.family else {}, join_media([sample], self.family).to_hf()
        problems = [f"{name}, which is not in its family's media" for name in of_images if name not in known]
        if sample.input_ids.tolist() != whole["input_ids"][0].tolist():
            problems.append("other token ids")
        for name in (name for name in known if name in of_images):
            if not torch.equal(made[name], of_images[name]):
                problems.append(f"other {name}")
        if problems:
            fault = f"the installed {type(self.processor).__name__} makes {'; '.join(problems)} of two images together"
            raise FamilyError(
                f"{fault} than of one at a time; use a supported transformers and the unmodified processor"
            )
        return True


# ---------------------------------------------------------------------- weights


def _last_alone(conversation: Conversation) -> Conversation:
    """Return the conversation with training only on its last answer, with that answer's own weights."""
    weights = conversation.weights
    return replace(conversation, turn_weights=((("", 0.0),),) * (len(weights) - 1) + weights[-1:])


def _check_answered(conversation: Conversation) -> None:
    """Refuse a conversation that would only train on ends of turns. An empty answer beside one with text is fine."""
    answers = [message for message in conversation.messages if message["role"] == "assistant"]
    said = zip(answers, conversation.weights, strict=True)
    trained = [(message, pieces) for message, pieces in said if is_trained(pieces)]
    if any(not is_empty(message.get(key)) for message, _ in trained for key in SPEAKING):
        return
    texts = [
        text_of(message) if len(pieces) == 1 else "".join(text for text, weight in pieces if weight)
        for message, pieces in trained
    ] + [*(conversation.plain or ())[1:]]
    if texts and not any(text.strip() for text in texts):
        which = "its answer is" if len(texts) == 1 else f"all its {len(texts)} answers are"
        fault = f"{which} empty ({texts[-1]!r:.40}), so only the end of a turn would be trained on"
        raise SampleError(f"{fault}; write the answer, or leave the sample out", "no_targets")


def _check_unweighed(conversation: Conversation) -> None:
    """Refuse weights other than 0 and 1 if everything is trained on. 0 and 1 only choose answers, and are ignored."""
    factors = [weight for pieces in conversation.turn_weights or () for _, weight in pieces]
    if odd := next((weight for weight in factors if weight not in (0, 1)), None):
        raise SampleError(f"an answer has the weight {odd}, but train_on='all' weights every token alike", "bad_row")


def _weights(tokens: Tokens, answers: Sequence[slice], conversation: Conversation) -> np.ndarray | None:
    """Return the weight of each token, float32 [n]: 1 outside the answers. None: 1 everywhere.

    Raises:
        SampleError: `turn_mismatch`: an answer's texts have several weights, but cannot be found in it.
    """
    if conversation.turn_weights is None or not answers:
        return None
    weights = np.ones(len(tokens.ids), np.float32)
    for answer, pieces in zip(answers, conversation.turn_weights, strict=True):
        weights[answer] = pieces[0][1] if len(pieces) == 1 else _weights_of_pieces(tokens, answer, pieces)
    return weights


def _weights_of_pieces(tokens: Tokens, answer: slice, pieces: Weights) -> list[float]:
    """Return the weight of each token of an answer whose texts have several weights.

        texts     "2 + 2 = 5? "  weight 0     "No, 4."  weight 1
        tokens     2  +  2  =  5  ?           No  ,  4  .  <|im_end|>

    A token belongs to the texts that contain its characters, apart from blanks. If there are several, it gets the
    lowest of their weights. Text that the template adds before the first text or after the last one belongs to that
    text.
    """
    start, stop = int(tokens.starts[answer.start]), int(tokens.stops[answer.stop - 1])
    places = [at for at in range(start, stop) if not tokens.text[at].isspace()]  # templates strip blanks
    said = "".join(map(tokens.text.__getitem__, places))
    sizes = [len("".join(text.split())) for text, _ in pieces]
    wanted = "".join("".join(text.split()) for text, _ in pieces)
    first = said.find(wanted)
    if first < 0 or (first and said.find(wanted, first + 1) >= 0):
        fault = f"texts of an answer have several weights, but the template does not write {wanted[:40]!r} once in it"
        raise SampleError(f"{fault}; give the answer one weight", "turn_mismatch")
    begins = np.array([places[first + at] for at in accumulate(sizes[:-1])])  # starts of the second text, the third ...
    weights = []
    for begin, end in zip(tokens.starts[answer].tolist(), tokens.stops[answer].tolist(), strict=True):
        text = tokens.text[begin:end]
        begin, end = begin + len(text) - len(text.lstrip()), end - len(text) + len(text.rstrip())
        lies_in = np.searchsorted(begins, [begin, max(begin, end - 1)], side="right").tolist()
        weights.append(min(weight for _, weight in pieces[lies_in[0] : lies_in[1] + 1]))
    return weights
