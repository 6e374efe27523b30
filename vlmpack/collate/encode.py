"""One sample of any accepted shape → token ids, labels and patches, with the user's own processor."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, final

import numpy as np

from vlmpack.collate.assemble import filler
from vlmpack.collate.audio import AudioReader
from vlmpack.collate.by_processor import ProcessorEncoder
from vlmpack.collate.chat_template import AnswerEnd, ChatTemplate, check_characters
from vlmpack.collate.columns import Kind, Markers, MediaRef, check_unread
from vlmpack.collate.conversation import Conversation, check_answered, read_conversation, unplaced_marker
from vlmpack.collate.encoded import (
    Encoded,
    TrainOn,
    Visual,
    assistant_spans,
    check_sample,
    make_labels,
    tokens_of,
)
from vlmpack.collate.media import BatchMedia, MediaReader
from vlmpack.collate.processor_images import ProcessorImages
from vlmpack.collate.processor_metadata import ProcessorMetadata, parts_of
from vlmpack.collate.tokenised import check_expert_types, read_tokenised, token_types
from vlmpack.collate.video_file import DEFAULT_RULES, FileRules
from vlmpack.data.images import ImageLimits
from vlmpack.errors import Refusal

Hearing = Callable[[Sequence[MediaRef]], tuple[Visual, ...]]
"""The audios of a sample, to their frames or their tokens."""


@final
@dataclass(frozen=True, kw_only=True)
class Encoder:
    """Samples → `Encoded`.

    The text comes from the processor's chat template and tokenizer, the patches from its image processor, and the
    placeholders are written as the processor writes them; the result equals `processor(text=..., images=...)`. The
    processor is not called as a whole, because it resizes all images of a call or none, needs torchvision for videos,
    and tokenises thousands of placeholders as text.
    """

    processor: Any
    """The Qwen processor."""
    metadata: ProcessorMetadata
    """The metadata of it."""
    limits: ImageLimits
    """Caps for images and frames."""
    train_on: TrainOn
    """Which tokens are learnt."""
    markers: Markers = "auto"
    """The meaning of `<image>` and `<video>` in a text."""
    name_unread: Callable[[Iterable[str]], Collection[str]] | None = None
    """Takes columns that nothing reads and returns those that no warning has named; None: no warning."""
    is_first: Callable[[str], bool] | None = None
    """Returns whether an event has not been warned of; None: no warning."""
    max_length: int | None = None
    """Tokens beyond which media are not made, as no sample holds them; None: no limit."""
    file_rules: FileRules = DEFAULT_RULES
    """Rules for sampling and sizing files of videos."""
    add_stop: str | None = None
    """Token written behind the last answer where the template writes none that ends it; None: nothing is."""
    ignored_keys: Collection[str] = ()
    """Keys of messages and their parts that are left out."""

    def encode(self, feature: Any, batch: BatchMedia | None = None) -> Encoded:
        """Encode and check one sample; media that the batch has already are not cut again.

        Raises:
            Refusal: the sample cannot be used.
            ConfigError: no sample can be used with this processor.
        """
        cut = partial(self.media.cut_each, batch=batch, max_tokens=self.max_length)
        return self._encode(feature, cut, lambda refs: self._audio.cut_each(refs))

    def measure(self, feature: Any, *, estimate: bool = False) -> Encoded:
        """The same without pixels, which are left where they are: images and videos are only measured, or estimated.

        Raises:
            Refusal: the sample cannot be used, as far as can be seen without decoding its media.
            ConfigError: no sample can be used, or images cannot be measured, with this processor.
        """
        measure = partial(self.media.measure_each, estimate=estimate)
        return self._encode(feature, measure, lambda refs: self._audio.measure_each(refs))

    def decode(self, sample: Encoded, batch: BatchMedia | None = None) -> Encoded:
        """A sample that was only measured, with the values of all its media.

        Raises:
            Refusal: one of them cannot be used, or has changed since.
        """
        decoded = self.media.decode(sample, batch)
        return self._audio.decode(decoded) if decoded.audios else decoded

    def _encode(self, feature: Any, read: Callable[..., tuple[Visual, ...]], hear: Hearing) -> Encoded:
        if not isinstance(feature, Mapping):
            raise Refusal("bad_row", f"a sample must be a mapping of columns, got a {type(feature).__name__}")
        if feature.get("input_ids") is not None:
            if self.metadata.by_processor:
                self._by_processor.check_not_tokenised()
            sample = read_tokenised(feature, self.metadata, train_on=self.train_on)
            if self.metadata.has_audio:
                sample = replace(sample, audios=self._audio.read_tokenised(feature))
            has_media = bool(sample.images or sample.videos or sample.audios)
            self._check_unread(self._without_expert_types(feature, sample), has_media=has_media, texts=())
        else:
            conversation = read_conversation(
                feature,
                has_vision=self.metadata.has_vision,
                has_audio=self.metadata.has_audio,
                markers=self.markers,
                ignored_keys=self.ignored_keys,
            )
            if self.train_on != "all":
                check_answered(conversation)
            self._warn_of_markers(conversation, feature)
            has_media = bool(conversation.images or conversation.videos or conversation.audios)
            self._check_unread(feature, has_media=has_media, texts=conversation.plain or tuple(conversation.texts()))
            sample = self._encode_conversation(conversation, read, hear)
        check_sample(sample, self.metadata)
        return sample

    def _without_expert_types(self, feature: Mapping[str, Any], sample: Encoded) -> Mapping[str, Any]:
        """The columns of a tokenised sample without the kinds of tokens for experts, which are compared and made anew.

        Raises:
            Refusal: they are not those of its ids.
        """
        name = self._by_processor.expert_types if self.metadata.by_processor else None
        if name is None or feature.get(name) is None:
            return feature
        check_expert_types(feature, name, self.processor.create_moe_mm_token_type_ids(sample.input_ids))
        return {column: value for column, value in feature.items() if column != name}

    def _check_unread(self, feature: Mapping[str, Any], *, has_media: bool, texts: Sequence[str]) -> None:
        columns = check_unread(feature, has_media=has_media or not self.metadata.has_vision, texts=texts)
        if columns and self.name_unread is not None and (new := self.name_unread(columns)):
            warnings.warn(f"samples have columns that nothing reads: {', '.join(new)}; this is said once", stacklevel=2)

    def _warn_of_markers(self, conversation: Conversation, feature: Mapping[str, Any]) -> None:
        """Warn once of a marker that is read as text, though the column of its medium may have been lost."""
        if self.is_first is None or self.markers != "auto" or not self.metadata.has_vision:
            return
        kind = unplaced_marker(conversation, feature)
        if kind is not None and self.is_first(f"marker of {kind}"):
            warnings.warn(
                f"a user's text holds '<{kind}>', but its sample has no column {kind} or {kind}s, so the marker is "
                f"read as a word: if the column was lost, markers='places' refuses such samples; if it is a word, "
                "markers='text' says so. Such samples are counted nowhere; this is said once",
                stacklevel=2,
            )

    def _encode_conversation(
        self, conversation: Conversation, read: Callable[..., tuple[Visual, ...]], hear: Hearing
    ) -> Encoded:
        self._check_texts(conversation)
        if (conversation.images or conversation.videos) and not self.metadata.has_vision:
            raise Refusal(
                "no_vision",
                f"it has {len(conversation.images)} image(s) and {len(conversation.videos)} video(s), but a tokenizer "
                "reads text only; give VLMCollator the processor of a vision-language model, or leave them out",
            )
        if conversation.videos and self.metadata.has_audio:
            raise Refusal(
                "no_video",
                f"it has {len(conversation.videos)} video(s), whose sizes and times a {type(self.processor).__name__} "
                "sets by rules of its own, which need torchvision: tokenise such samples with the processor itself "
                "(input_ids, labels, pixel_values_videos, ...), or give frames as images",
            )
        images, videos = read(conversation.images, kind="image"), read(conversation.videos, kind="video")
        audios = hear(conversation.audios)
        if conversation.plain:
            prompt, completion = conversation.plain
            conversation = replace(conversation, plain=(self._marked(prompt, images, videos, audios), completion))
        if self.metadata.by_processor:
            return self._by_processor.encode(conversation, images)
        if conversation.plain:
            ids, spans = self._plain(conversation.plain, images, videos, audios)
        else:
            ids, spans = self._chat(conversation, images, videos, audios)
        return Encoded(
            input_ids=ids,
            labels=make_labels(ids, self.metadata, spans=None if self.train_on == "all" else spans),
            types=token_types(ids, self.metadata),
            images=images,
            videos=videos,
            audios=audios,
        )

    @cached_property
    def _audio(self) -> AudioReader:
        """Reads audio."""
        return AudioReader(processor=self.processor, metadata=self.metadata)

    @cached_property
    def media(self) -> MediaReader | ProcessorImages:
        """Reads images and videos, measured ones included."""
        if self.metadata.by_processor:
            return self._by_processor.images
        parts = parts_of(self.processor)
        return MediaReader(
            image_processor=parts.image_processor,
            video_processor=parts.video_processor,
            metadata=self.metadata,
            limits=self.limits,
            file_rules=self.file_rules,
        )

    @cached_property
    def filler(self) -> Encoded:
        """The sample of a batch without samples: see `assemble.filler`."""
        return self._by_processor.filler if self.metadata.by_processor else filler(self.metadata)

    @cached_property
    def _by_processor(self) -> ProcessorEncoder:
        return ProcessorEncoder(
            processor=self.processor,
            metadata=self.metadata,
            template=self._template,
            images=ProcessorImages(processor=self.processor, metadata=self.metadata, limits=self.limits),
            train_on=self.train_on,
            answer_end=self._answer_end,
            max_length=self.max_length,
        )

    @cached_property
    def _answer_end(self) -> AnswerEnd:
        return AnswerEnd(token=self.add_stop, is_first=self.is_first)

    @cached_property
    def _template(self) -> ChatTemplate:
        return ChatTemplate(
            processor=self.processor,
            takes_parts=self.metadata.has_vision,
            special_tokens=self.metadata.special_tokens,
        )

    # ------------------------------------------------------------------ text

    def _check_texts(self, conversation: Conversation) -> None:
        """A person's text that holds the template's own tokens would make false images or false turns.

        Templates that write XML put the angle brackets around a name: `<|im_end|` is as good as the token.
        """
        typed = conversation.texts() if conversation.plain is None else conversation.plain[1:]
        for text in typed:
            framed = f"<{text}>"
            if not any(token in framed for token in self._special):
                continue
            reserved = self._reserved if conversation.plain is None else self._media
            if token := next((token for token in reserved if token in framed), None):
                raise Refusal(
                    "reserved_token_in_text",
                    f"its text holds {token!r}, which only the processor and the chat template may write; remove it, "
                    "and give images and videos as parts of the message",
                )

    @cached_property
    def _special(self) -> tuple[str, ...]:
        """All special tokens: to look for these is enough in a text that has none."""
        return tuple(dict.fromkeys((*self.metadata.media_tokens, *self.metadata.special_tokens)))

    @cached_property
    def _reserved(self) -> tuple[str, ...]:
        """Tokens that the processor or the chat template writes; any other special token is text."""
        named = parts_of(self.processor).tokenizer.special_tokens_map
        ends = [str(named[name]) for name in ("bos_token", "eos_token", "pad_token") if name in named]
        return tuple(dict.fromkeys((*self._media, *self._template.tokens, *ends)))

    @cached_property
    def _media(self) -> tuple[str, ...]:
        """Tokens of images, videos and audio."""
        return self._by_processor.media_tokens if self.metadata.by_processor else self.metadata.media_tokens

    def _chat(self, conversation: Conversation, *media: Sequence[Visual]) -> tuple[np.ndarray, list[tuple[int, int]]]:
        """(ids, learnt spans) of a conversation; `media`: images, videos, audios."""
        text = self._template.render(conversation)
        ids = self._expand(text + self._answer_end.of(conversation, text, self._template), *media)
        if self.train_on == "all":
            return ids, []
        spans = assistant_spans(ids, self.metadata)
        self._check_turns(spans, sum(message["role"] == "assistant" for message in conversation.messages))
        if conversation.trained_turns is None:
            return ids, spans
        return ids, [span for span, learnt in zip(spans, conversation.trained_turns, strict=True) if learnt]

    def _check_turns(self, spans: Sequence[tuple[int, int]], count: int) -> None:
        if len(spans) != count:
            raise Refusal(
                "turn_mismatch",
                f"the chat template wrote {len(spans) or 'no'} '<|im_start|>assistant' turns for {count} assistant "
                "messages, so it is not known which tokens to learn; use a ChatML template (every Qwen-VL has one), "
                "train_on='all', prompt and completion as strings, or tokenised samples with labels",
                of_all=not spans,
            )

    def _plain(self, plain: tuple[str, str], *media: Sequence[Visual]) -> tuple[np.ndarray, list[tuple[int, int]]]:
        """(ids, learnt span) of prompt and completion, tokenised apart as generation will do it; the end is learnt."""
        prompt, completion = plain
        if not completion.rstrip().endswith(self.metadata.eos_token):
            completion += self.metadata.eos_token
        before, after = self._expand(prompt, *media), self._ids(completion)
        return np.concatenate((before, after)), [(len(before), len(before) + len(after))]

    def _marked(self, prompt: str, images: Sequence[Visual], videos: Sequence[Visual], audios: Sequence[Visual]) -> str:
        """A plain prompt with its `<image>`, `<video>` and `<audio>` as placeholders, if it does not hold these."""
        metadata = self.metadata
        seen, heard = (metadata.vision_start, metadata.vision_end), (metadata.audio_start, metadata.audio_end)
        kinds = (
            ("image", metadata.image_token, len(images), seen),
            ("video", metadata.video_token, len(videos), seen),
            ("audio", metadata.audio_token, len(audios), heard),
        )
        for kind, token, count, (start, end) in kinds:
            marker = f"<{kind}>"
            if not count or token in prompt or self.markers == "text":
                continue
            if prompt.count(marker) != count:
                raise Refusal(
                    "media_count_mismatch",
                    f"its prompt holds {marker!r} {prompt.count(marker)} time(s) for {count} {kind}(s); write one for "
                    "each, where it belongs in the text, or give prompt and completion as lists of messages",
                )
            prompt = prompt.replace(marker, f"{start}{token}{end}")
        return prompt

    def _ids(self, text: str) -> np.ndarray:
        """Tokenise any text that goes into a sample, its characters checked: those that the template writes too."""
        check_characters(text)
        return np.asarray(parts_of(self.processor).tokenizer(text)["input_ids"], np.int64)

    # ------------------------------------------------------------------ placeholders

    def _expand(
        self, text: str, images: Sequence[Visual], videos: Sequence[Visual], audios: Sequence[Visual]
    ) -> np.ndarray:
        """Tokenise text with one placeholder a medium, then repeat each as often as its grid or its frames need."""
        if self.metadata.frame_timestamps:
            text = self._write_frames(text, videos)
        ids = self._ids(text)
        counts = np.ones(len(ids), np.int64)
        media: list[tuple[Kind, Sequence[Visual]]] = [("image", images), ("video", videos)]
        if self.metadata.has_audio:
            media.append(("audio", audios))
        for kind, visuals in media:
            needed = [n for visual in visuals for n in tokens_of(visual, self.metadata, kind=kind)]
            at = np.flatnonzero(ids == self.metadata.token_id(kind))
            if len(at) != len(needed):
                raise Refusal(
                    "placeholder_mismatch",
                    f"its text has {len(at)} {kind} placeholder(s) for {len(needed)} {kind} run(s); the chat template "
                    f"(or the prompt) must write one for each {kind}",
                )
            counts[at] = needed
        return np.repeat(ids, counts)

    def _write_frames(self, text: str, videos: Sequence[Visual]) -> str:
        """Write frames as `Qwen3VLProcessor.replace_video_token` does: each between vision tokens, after its time."""
        metadata = self.metadata
        placeholder = f"{metadata.vision_start}{metadata.video_token}{metadata.vision_end}"
        written = iter(["".join(f"<{time:.1f} seconds>{placeholder}" for time in video.timestamps) for video in videos])
        if text.count(metadata.video_token) != len(videos):
            raise Refusal(
                "placeholder_mismatch",
                f"its text has {text.count(metadata.video_token)} video placeholder(s) for {len(videos)} video(s)",
            )
        return re.sub(re.escape(metadata.video_token), lambda _: next(written), text)
