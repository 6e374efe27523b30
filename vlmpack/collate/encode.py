"""One sample of any accepted shape → token ids, labels and tensors, with the user's own processor: `Encoder`.

    template    <start_of_turn>user\n <boi> What is it?<end_of_turn>\n<start_of_turn>model\nA cat<end_of_turn>\n
    expanded    <start_of_turn>user\n \n\n<boi><image><eoi>\n\n What is it?<end_of_turn>...
    tokens      the expanded text's, each placeholder repeated as often as its image needs
    labels      tokens of the answers and of what ends them, and never those of an image

The chat template and the tokenizer are called as `apply_chat_template(tokenize=True)` calls them, and each image is
written as `replace_image_token` writes it; of each run of placeholders one is tokenised, and then repeated. Images go
through the processor one at a time, because their sizes may differ. Before the first one, a sample of two trial images
is encoded both here and by one call of the whole processor: every token and value must be the same.

Answers are found in the ids where the template writes ChatML (`<|im_start|>assistant`), else in the template's text.
"""

from __future__ import annotations

import re
import warnings
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from PIL import Image

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
from vlmpack.collate.media import BatchMedia, MediaReader, trial_image
from vlmpack.collate.processor_metadata import ProcessorMetadata
from vlmpack.collate.tokenised import read_tokenised, token_types
from vlmpack.collate.video import DEFAULT_RULES, FileRules
from vlmpack.data.formats import KINDS, Kind, is_empty
from vlmpack.data.images import ImageLimits
from vlmpack.data.messages import (
    SPEAKING,
    Conversation,
    Markers,
    Weights,
    check_unread,
    is_trained,
    read_conversation,
    text_of,
)
from vlmpack.errors import FamilyError, Refusal
from vlmpack.families.family import Family
from vlmpack.families.registry import family_of_processor

TOKEN_NAMES = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids", "labels")
"""Outputs of a processor with an entry for each token; all others are an image's."""
_TRIAL = ((120, 90), (70, 260))
"""Heights and widths of the images of the trial sample."""
_SMALLEST = (64, 64)
"""Height and width of the image in a batch without samples."""
_TILED = (800, 1100)
"""Width and height of an image that is cut into tiles."""
_NUMBERS = re.compile(r"\d+")

Visuals = Mapping[Kind, Sequence[Visual]]
"""The media of a sample by kind, each in the order of their placeholders."""


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """The n tokens of a text in which media are expanded, to one placeholder a run."""

    ids: np.ndarray
    """int64 [n]."""
    text: str = ""
    """The expanded text."""
    starts: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    """int64 [n]: first character of each in it; one without any stands where the last one ended. Empty: not needed."""
    stops: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    """int64 [n]: the character after its last. Empty: not needed."""
    media: tuple[Span, ...] = ()
    """Characters of each medium in it."""
    places: tuple[Span, ...] = ()
    """Characters of each medium's placeholder in the text before."""

    def moved(self, at: int) -> int:
        """Return the place in the expanded text of a character of the text before."""
        gained = [0, *(medium[1] - place[1] for medium, place in zip(self.media, self.places, strict=True))]
        return at + gained[bisect_right([stop for _, stop in self.places], at)]

    def between(self, span: Span) -> slice:
        """The tokens of these characters of the expanded text, those that reach into them included."""
        start = int(np.searchsorted(self.stops, span[0], side="right"))
        return slice(start, max(start, int(np.searchsorted(self.starts, span[1]))))

    def followed_by(self, other: Tokens) -> Tokens:
        """These tokens and those of a text without media behind them."""
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
    """Samples → `Encoded`: the ids and tensors that `processor(text=..., images=...)` gives."""

    processor: Any
    """The processor, or the tokenizer of a text model."""
    metadata: ProcessorMetadata
    """Its metadata."""
    limits: ImageLimits
    """Caps for images and frames."""
    train_on: TrainOn
    """Which tokens are trained on."""
    markers: Markers = "auto"
    """The meaning of `<image>` and `<video>` in a text."""
    name_unread: Callable[[Iterable[str]], Collection[str]] | None = None
    """Takes columns that nothing reads and returns those that no warning has named; None: no warning."""
    is_first: Callable[[str], bool] | None = None
    """Returns whether an event has not been warned of; None: no warning."""
    max_length: int | None = None
    """Tokens beyond which media are not made, as no sample holds them; None: no limit."""
    truncates_start: bool = False
    """Of a longer sample the end is kept: its first media are cut off, not its last."""
    file_rules: FileRules = DEFAULT_RULES
    """Rules for sampling and sizing files of videos."""
    add_stop: str | None = None
    """Token written behind the last answer where the template writes none that ends it; None: nothing is."""
    ignored_keys: Collection[str] = ()
    """Keys of messages and their parts that are left out."""

    def encode(self, feature: Any, batch: BatchMedia | None = None) -> Encoded:
        """Encode and check one sample; media that the batch has already are not processed again.

        Raises:
            Refusal: the sample cannot be used.
            ConfigError: no sample can be used with this processor.
        """

        limit = None if self.truncates_start else self.max_length
        return self._encode(feature, partial(self.media.load_each, batch=batch, max_tokens=limit))

    def measure(self, feature: Any) -> Encoded:
        """The same without pixels, which are left where they are: images and videos are only measured.

        Raises:
            Refusal: the sample cannot be used, as far as can be seen without decoding its media.
            ConfigError: no sample can be used, or images cannot be measured, with this processor.
        """
        return self._encode(feature, self.media.measure_each)

    @cached_property
    def media(self) -> MediaReader:
        """Reads images and videos, measured ones included."""
        return MediaReader(
            processor=self.processor,
            metadata=self.metadata,
            limits=self.limits,
            file_rules=self.file_rules,
        )

    @cached_property
    def filler(self) -> Encoded:
        """The sample of a batch without samples: a small black image, or one token of text; no targets.

        A rank without a step would block the others in the next collective; with this sample it runs forward and
        backward through every part of the model, with a loss of 0.
        """
        metadata = self.metadata
        if not metadata.has_vision:
            return self._sample(Tokens(ids=np.array([metadata.pad_token_id], np.int64)), [], {})
        if metadata.by_processor:
            images = self.media.process([Image.new("RGB", _SMALLEST)])
            tokens = self._tokenise(self._laid_out(metadata.image_token, 1), {"image": images})
        else:
            merge = metadata.merge_size
            images = (Visual(pixels=torch.zeros(merge * merge, metadata.patch_dim), grid=(1, merge, merge)),)
            ids = (metadata.vision_start_id, metadata.image_token_id, metadata.vision_end_id)
            tokens = Tokens(ids=np.array(ids, np.int64))
        return self._sample(tokens, [], {"image": images})

    @cached_property
    def _template(self) -> ChatTemplate:
        return ChatTemplate(
            processor=self.processor,
            takes_parts=self.metadata.has_vision,
            special_tokens=self.metadata.special_tokens,
            reads_marks=self.metadata.by_processor,
            add_stop=self.add_stop,
            is_first=self.is_first,
        )

    # ------------------------------------------------------------------ a sample

    def _encode(self, feature: Any, read: Callable[..., Sequence[Visual]]) -> Encoded:
        if not isinstance(feature, Mapping):
            raise Refusal("bad_row", f"a sample must be a mapping of columns, got a {type(feature).__name__}")
        if feature.get("input_ids") is not None:
            sample = self._tokenised(feature)
            made = self._family.expert_types if self._family else None  # kinds of tokens, by which experts are chosen
            has_media = any(sample.media.values()) or not self.metadata.has_vision
            named = {name: feature[name] for name in feature if name != made}
            self._warn_of_unread(check_unread(named, has_media=has_media, texts=()))
        else:
            conversation = read_conversation(
                feature,
                has_vision=self.metadata.has_vision,
                has_audio=self.metadata.has_audio,
                markers=self.markers,
                ignored_keys=self.ignored_keys,
            )
            if self.train_on == "last":
                conversation = _last_alone(conversation)
            if self.train_on != "all":
                _check_answered(conversation)
            self._warn_of_unread(conversation.unread)
            if (kind := conversation.unplaced) and self.is_first is not None and self.is_first(f"marker of {kind}"):
                seen = f"a user's text holds '<{kind}>', but its sample has no column {kind} or {kind}s, so the marker"
                remedy = "if its column was lost, choose markers='places', which refuses such samples; else 'text'"
                warnings.warn(f"{seen} is read as a word: {remedy}. This is said once", stacklevel=2)
            sample = self._encode_conversation(conversation, lambda kind: read(conversation.media[kind], kind=kind))
        check_sample(sample, self.metadata)
        return sample

    def _warn_of_unread(self, columns: Sequence[str]) -> None:
        if columns and self.name_unread is not None and (new := self.name_unread(columns)):
            warnings.warn(f"samples have columns that nothing reads: {', '.join(new)}; this is said once", stacklevel=2)

    def _tokenised(self, feature: Mapping[str, Any]) -> Encoded:
        """A sample of token ids; kinds of its tokens for experts are made anew."""
        if self._columns:
            raise Refusal("bad_row", f"it has input_ids, but {self._is_of_prefix}, and images", of_all=True)
        sample = read_tokenised(feature, self.metadata, train_on=self.train_on)
        if self.metadata.has_audio:
            sample = replace(sample, audios=self.media.audio.read_tokenised(feature))
        return sample

    def _encode_conversation(self, conversation: Conversation, read: Callable[[Kind], Sequence[Visual]]) -> Encoded:
        self._check_texts(conversation)
        num_images, num_videos = len(conversation.media["image"]), len(conversation.media["video"])
        if (num_images or num_videos) and not self.metadata.has_vision:
            seen = f"it has {num_images} image(s) and {num_videos} video(s), but a tokenizer reads text only"
            raise Refusal("no_vision", f"{seen}; give VLMCollator the processor of a vision-language model")
        media: Visuals = {kind: read(kind) for kind in KINDS}
        if media["image"]:
            assert self._is_confirmed
        return (self._plain if conversation.plain else self._chat)(conversation, media)

    def _chat(self, conversation: Conversation, media: Visuals) -> Encoded:
        if self._columns:
            raise Refusal("template_error", f"it is a conversation, but {self._is_of_prefix}", of_all=True)
        text = self._template.render(conversation)
        weights = conversation.turn_weights
        if self.train_on == "all":
            _check_unweighed(conversation)
        if not self.metadata.by_processor and ("</think>" not in text or self.train_on == "all"):
            text += self._template.end_of(conversation, text)
            tokens = self._tokenise(text, media, has_offsets=any(len(pieces) > 1 for pieces in weights or ()))
            if self._is_too_long(tokens):
                tokens = self._tokenise(text, media, has_offsets=True)
            spans, ends = self._spans(tokens.ids, conversation), []
        else:
            answers = [] if self.train_on == "all" else self._template.answers(conversation, text)
            trained = [span for at, span in enumerate(answers) if weights is None or is_trained(weights[at])]
            if end := self._template.end_of(conversation, text, None if self.train_on == "all" else trained):
                text += end
                answers[-1:] = [(start, len(text)) for start, _ in answers[-1:]]
            tokens = self._tokenise(self._laid_out(text, len(media["image"]), is_chat=True), media, has_offsets=True)
            spans = [self._answer(tokens, span) for span in answers]
            ends = [self._answer(tokens, (self._template.stop_of(text, span), span[1])) for span in answers]
        weights_n = _weights(tokens, spans, conversation)
        return self._sample(tokens, spans, media, ends=ends, weights=weights_n)

    def _is_too_long(self, tokens: Tokens) -> bool:
        return self.max_length is not None and len(tokens.ids) > self.max_length

    def _plain(self, conversation: Conversation, media: Visuals) -> Encoded:
        """Tokenise prompt and completion apart, as generation will do it; the completion and its end are the target."""
        assert conversation.plain is not None
        prompt, completion = self._marked(conversation.plain[0], media), conversation.plain[1]
        if self._columns and not media["image"]:
            name = type(self.processor).__name__
            raise Refusal("bad_row", f"a {name} writes no prompt without an image, and it has none; leave it out")
        if not completion.rstrip().endswith(self.metadata.eos_token):
            completion += self.metadata.eos_token
        may_cut = self.max_length is not None
        before = self._tokenise(self._laid_out(prompt, len(media["image"])), media, has_offsets=may_cut)
        tokens = before.followed_by(self._tokenise(completion, {}, is_continued=True, has_offsets=may_cut))
        return self._sample(tokens, [slice(len(before.ids), None)], media, prefix=len(before.ids))

    def _sample(
        self,
        tokens: Tokens,
        answers: Sequence[slice],
        media: Visuals,
        *,
        ends: Sequence[slice] = (),
        prefix: int | None = None,
        weights: np.ndarray | None = None,
    ) -> Encoded:
        """Label a sample: its answers, or everything, except media, the tokens around them and the first token.

        If it is too long, note what truncation keeps whole: its media and the `ends` of answers. `prefix`: tokens of
        the prompt; None: all of them. `weights`: float32 [n] of its tokens; None: 1.
        """
        ids, metadata = tokens.ids, self.metadata
        visuals: dict[str, Any] = {f"{kind}s": tuple(each) for kind, each in media.items()}
        around = self._around_media(tokens) if len(tokens.starts) else []
        spans = None if self.train_on == "all" else [(answer.start, answer.stop) for answer in answers]
        in_answer = np.arange(len(ids)) >= (len(ids) if prefix is None else prefix)
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
        """The tokens of ChatML's answers."""
        if self.train_on == "all":
            return []
        spans = assistant_spans(ids, self.metadata)
        count = sum(message["role"] == "assistant" for message in conversation.messages)
        if len(spans) != count:
            fault = f"the chat template wrote {len(spans) or 'no'} '<|im_start|>assistant' turns for {count} assistant"
            remedy = "use a ChatML template (every Qwen-VL has one), train_on='all', or tokenised samples with labels"
            of_all = not spans
            raise Refusal("turn_mismatch", f"{fault} messages, so answers are not known; {remedy}", of_all=of_all)
        return [slice(*span) for span in spans]

    def _answer(self, tokens: Tokens, span: Span) -> slice:
        """The tokens of an answer in the template's text.

        One that reaches into it from the header counts if it holds no more than blanks of the header, or if the
        template marks the answer itself: as transformers does. One that reaches out of it counts if it holds no more
        than blanks of what follows: of LLaVA's "4 USER:" the token " US" does not.
        """
        start, stop = tokens.moved(span[0]), tokens.moved(span[1])
        hit = tokens.between((start, stop))
        if hit.start == hit.stop:
            return hit
        before = tokens.text[tokens.starts[hit.start] : start].strip(" ")
        behind = tokens.text[stop : tokens.stops[hit.stop - 1]].strip()
        return slice(hit.start + bool(before and not self._template.marks_answers), hit.stop - bool(behind))

    def _around_media(self, tokens: Tokens) -> list[slice]:
        """Return the tokens of each medium, including those that the template writes around it."""
        ids, (start, end), slices = tokens.ids.tolist(), self._borders, []
        for span in tokens.media:
            hit = tokens.between(span)
            before, after = max(hit.start - len(start), 0), hit.stop + len(end)
            first = before if ids[before : hit.start] == start else hit.start
            slices.append(slice(first, after if ids[hit.stop : after] == end else hit.stop))
        return slices

    @cached_property
    def _borders(self) -> tuple[list[int], list[int]]:
        """Ids of what templates write before and after an image."""
        tokenizer, metadata = self.media.parts.tokenizer, self.metadata
        start, end = (
            tokenizer.encode(text, add_special_tokens=False) for text in (metadata.vision_start, metadata.vision_end)
        )
        return start, end

    # ------------------------------------------------------------------ tokens

    def _tokenise(self, text: str, media: Visuals, *, is_continued: bool = False, has_offsets: bool = False) -> Tokens:
        """Expand the placeholders of a text, tokenise it, and repeat each placeholder as often as its medium needs.

        Args:
            text: with one placeholder a medium.
            media: in their order.
            is_continued: true of a text that follows another one, which gets no beginning of its own.
            has_offsets: also find the characters of each token; of processors that are used whole, they always are.

        Raises:
            Refusal: it has another number of placeholders (`placeholder_mismatch`), or half a character (`bad_text`).
        """
        check_characters(text)
        expanded, places, spans = self._expand(text, media)
        tokenizer = self.media.parts.tokenizer
        begins = tokenizer.bos_token is not None and text.startswith(tokenizer.bos_token)
        options = self.media.text_options if self.metadata.has_vision else {}
        if begins or is_continued:
            options = {"add_special_tokens": False}
        has_offsets = has_offsets or self.metadata.by_processor
        out = tokenizer(expanded, return_offsets_mapping=has_offsets, **options)
        ids = np.asarray(out["input_ids"], np.int64)
        repeats = self._repeats(ids, media)
        columns = {"ids": ids}
        if has_offsets:
            offsets = np.array(out["offset_mapping"], np.int64).reshape(-1, 2)
            is_empty = offsets[:, 0] >= offsets[:, 1]
            ended = np.maximum.accumulate(np.where(is_empty, 0, offsets[:, 1]))
            columns["starts"], columns["stops"] = (np.where(is_empty, ended, offsets[:, at]) for at in (0, 1))
        repeated = {name: np.repeat(column, repeats) for name, column in columns.items()}
        return Tokens(**repeated, text=expanded, media=spans, places=places)

    def _repeats(self, ids: np.ndarray, media: Visuals) -> np.ndarray:
        """int64 [n]: how often each token of an expanded text is there: placeholders as often as their media need."""
        repeats, types = np.ones(len(ids), np.int64), token_types(ids, self.metadata)
        for kind, visuals in media.items():
            needed = [count for visual in visuals for count in tokens_of(visual, self.metadata, kind=kind)]
            if not needed:
                continue
            at = np.flatnonzero(types == TYPES[kind])
            if len(at) != len(needed):
                fault = f"the tokenizer makes {len(at)} placeholders of {len(needed)} that stand for its {kind}s"
                raise Refusal("placeholder_mismatch", f"{fault}; use the model's own tokenizer", of_all=True)
            repeats[at] = needed
        return repeats

    def _expand(self, text: str, media: Visuals) -> tuple[str, tuple[Span, ...], tuple[Span, ...]]:
        """(expanded text, placeholders in the text before, media in the expanded text)."""
        places: list[Span] = []
        texts: dict[int, str] = {}
        for kind, token in self._placeholders:
            visuals = media.get(kind, ())
            found = [match.span() for match in re.finditer(re.escape(token), text)]
            if len(found) != len(visuals):
                counts = f"{len(found)} {kind} placeholder(s) {token!r} for {len(visuals)} {kind}(s)"
                fault = f"its text has {counts}; the chat template (or the prompt) must write one for each {kind}"
                raise Refusal("placeholder_mismatch", fault)
            places += found
            written = self._written(kind, visuals, text)
            texts |= {start: to for (start, _), to in zip(found, written, strict=True)}
        places.sort()
        gains = accumulate((len(texts[start]) - (stop - start) for start, stop in places), initial=0)
        spans = [(a + gain, a + gain + len(texts[a])) for (a, _), gain in zip(places, gains, strict=False)]
        pieces, end = [], 0
        for start, stop in places:
            pieces += [text[end:start], texts[start]]
            end = stop
        return "".join((*pieces, text[end:])), tuple(places), tuple(spans)

    def _written(self, kind: Kind, visuals: Sequence[Visual], text: str) -> list[str]:
        """The texts in place of the placeholders of a kind.

        Frames are written as `Qwen3VLProcessor.replace_video_token` does: each between vision tokens, after its time.
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
        """The kinds of media that a text may have, and the token that stands for one of them."""
        metadata = self.metadata
        tokens = (metadata.image_token, metadata.video_token, metadata.audio_token)
        return tuple((kind, token) for kind, token in zip(KINDS, tokens, strict=True) if token)

    def _marked(self, prompt: str, media: Visuals) -> str:
        """A plain prompt with its `<image>`, `<video>` and `<audio>` as placeholders, if it does not hold these."""
        metadata = self.metadata
        around = {"audio": (metadata.audio_start, metadata.audio_end)}
        for kind, token in self._placeholders:
            count, marker = len(media[kind]), f"<{kind}>"
            if not count or token in prompt or self.markers == "text":
                continue
            if prompt.count(marker) != count:
                seen = f"its prompt holds {marker!r} {prompt.count(marker)} time(s) for {count} {kind}(s)"
                raise Refusal("media_count_mismatch", f"{seen}; write one for each, or give lists of messages")
            start, end = around.get(kind, (metadata.vision_start, metadata.vision_end))
            prompt = prompt.replace(marker, f"{start}{token}{end}")
        return prompt

    def _laid_out(self, text: str, count: int, *, is_chat: bool = False) -> str:
        """Lay a text out as the processor does before it puts images in: PaliGemma's writes more around them.

        Raises:
            Refusal: it changes what a chat template wrote, in which the places of answers would be lost.
        """
        if not count or not self.metadata.by_processor:
            return text
        blank = Image.new("RGB", _SMALLEST)
        laid_out = self.processor.prepare_inputs_layout(images=[[blank] * count], text=[text])[1][0]
        if is_chat and laid_out != text:
            fault = f"the {type(self.processor).__name__} changes what the chat template writes"
            remedy = "so answers are not found; give prompt and completion as strings"
            raise Refusal("template_error", f"{fault}, {remedy}", of_all=True)
        return laid_out

    # ------------------------------------------------------------------ special tokens in a person's text

    def _check_texts(self, conversation: Conversation) -> None:
        """A person's text that holds the template's own tokens would make false images or false turns.

        Templates that write XML put the angle brackets around a name: `<|im_end|` is as good as the token.
        """
        typed = conversation.texts() if conversation.plain is None else conversation.plain[1:]
        for text in typed:
            framed = f"<{text}>"
            if not any(token in framed for token in self._special):
                continue
            reserved = self._reserved if conversation.plain is None else self._media_tokens
            if token := next((token for token in reserved if token in framed), None):
                fault = f"its text holds {token!r}, which only the processor and the chat template may write; remove it"
                raise Refusal("reserved_token_in_text", f"{fault}, and give images and videos as parts")

    @cached_property
    def _special(self) -> tuple[str, ...]:
        """All special tokens: to look for these is enough in a text that has none."""
        return tuple(dict.fromkeys((*self.metadata.media_tokens, *self.metadata.special_tokens)))

    @cached_property
    def _reserved(self) -> tuple[str, ...]:
        """Tokens that the processor or the chat template writes; any other special token is text."""
        named = self.media.parts.tokenizer.special_tokens_map
        ends = [str(named[name]) for name in ("bos_token", "eos_token", "pad_token") if name in named]
        return tuple(dict.fromkeys((*self._media_tokens, *self._template.tokens, *ends)))

    @cached_property
    def _media_tokens(self) -> tuple[str, ...]:
        """Special tokens of images, videos and audio: those that have names, and those in the text of an image.

        Of tokens that differ in their numbers, such as those of rows and columns, all are there if one is.
        """
        if not (self.metadata.has_vision and self.metadata.by_processor):
            return self.metadata.media_tokens
        (image,) = self.media.process([Image.new("RGB", _TILED)])
        kinds = {_NUMBERS.sub("", token) for token in self.metadata.special_tokens if token in image.written}
        alike = [token for token in self.metadata.special_tokens if _NUMBERS.sub("", token) in kinds]
        return (*self.metadata.media_tokens, *alike)

    # ------------------------------------------------------------------ the processor as a whole

    @cached_property
    def _family(self) -> Family | None:
        return family_of_processor(self.processor) if self.metadata.has_vision else None

    @property
    def _columns(self) -> tuple[str, ...]:
        """Names of the columns that the model needs beside ids: that of the prefix, which is the prompt."""
        return self._family.token_columns if self._family else ()

    @property
    def _is_of_prefix(self) -> str:
        return (
            f"a {type(self.processor).__name__} writes a prompt, whose tokens see each other in both directions, and "
            "its answer: give prompt and completion as strings"
        )

    @cached_property
    def _is_confirmed(self) -> bool:
        """True: the whole processor gives the same ids and tensors for a sample of two images.

        Raises:
            FamilyError: it does not; the message names what differs.
        """
        pictures = [trial_image(size) for size in _TRIAL]
        text = f"{self.metadata.image_token}a {self.metadata.image_token} b"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # GLM-4V's, of numpy
            whole = self.processor(text=[text], images=[pictures], return_tensors="pt")
        groups = [pictures] if self.metadata.images_together else [[picture] for picture in pictures]
        visuals = [visual for group in groups for visual in self.media.process(group)]
        ids = self._tokenise(self._laid_out(text, len(pictures)), {"image": visuals}).ids
        media = self._family.media if self._family else {}
        problems = [
            f"{name}, which is not in its family's media" for name in whole if name not in (*TOKEN_NAMES, *media)
        ]
        if ids.tolist() != whole["input_ids"][0].tolist():
            problems.append("other token ids")
        for name in (name for name in media if name in whole):
            parts = [part for visual in visuals if (part := _tensor(visual, name)) is not None]
            if not torch.equal(media[name](parts), whole[name]):
                problems.append(f"other {name}")
        if problems:
            fault = f"the installed {type(self.processor).__name__} makes {'; '.join(problems)} of two images together"
            remedy = "use a transformers of the supported range, and the model's unmodified processor"
            raise FamilyError(f"{fault} than of one at a time, so its samples cannot be encoded; {remedy}")
        return True


def _tensor(visual: Visual, name: str) -> torch.Tensor | None:
    """A tensor of an image by the name under which the processor returns it; None: this image has none."""
    if name == "image_grid_thw":
        return torch.tensor([visual.grid])
    assert visual.pixels is not None
    return visual.pixels if name == "pixel_values" else visual.tensors.get(name)


# ---------------------------------------------------------------------- what is trained on


def _last_alone(conversation: Conversation) -> Conversation:
    """Return a conversation of whose answers the last alone is trained on, by its own weights."""
    count = sum(message["role"] == "assistant" for message in conversation.messages)
    weights: tuple[Weights, ...] = conversation.turn_weights or ((("", 1.0),),) * count
    return replace(conversation, turn_weights=((("", 0.0),),) * (count - 1) + weights[-1:]) if count else conversation


def _check_answered(conversation: Conversation) -> None:
    """Refuse a conversation that would teach the end of a turn alone; an empty answer beside one with text is kept."""
    answers = [message for message in conversation.messages if message["role"] == "assistant"]
    weights = conversation.turn_weights or ((("", 1.0),),) * len(answers)
    trained = [(message, pieces) for message, pieces in zip(answers, weights, strict=True) if is_trained(pieces)]
    if any(not is_empty(message.get(key)) for message, _ in trained for key in SPEAKING):
        return
    texts = [
        text_of(message) if len(pieces) == 1 else "".join(text for text, weight in pieces if weight)
        for message, pieces in trained
    ] + [*(conversation.plain or ())[1:]]
    if texts and not any(text.strip() for text in texts):
        which = "its answer is" if len(texts) == 1 else f"all its {len(texts)} answers are"
        fault = f"{which} empty ({texts[-1]!r:.40}), so only the end of a turn would be trained on; write the answer"
        raise Refusal("no_targets", f"{fault}, leave the sample out, or choose train_on='all'")


def _check_unweighed(conversation: Conversation) -> None:
    """Refuse weights where everything is trained on, answer or not; 0 and 1 say what is an answer to be learnt."""
    factors = [weight for pieces in conversation.turn_weights or () for _, weight in pieces]
    if odd := next((weight for weight in factors if weight not in (0, 1)), None):
        fault = f"an answer has the weight {odd}, but train_on='all' weighs every token alike"
        raise Refusal("bad_row", f"{fault}; choose train_on='assistant', or leave the weight out")


def _weights(tokens: Tokens, answers: Sequence[slice], conversation: Conversation) -> np.ndarray | None:
    """float32 [n]: the weight of each token of the answers, 1 elsewhere; None: 1 everywhere.

    Raises:
        Refusal: `turn_mismatch`: texts of an answer have several weights, and are not found in it.
    """
    if conversation.turn_weights is None or not answers:
        return None
    weights = np.ones(len(tokens.ids), np.float32)
    for answer, pieces in zip(answers, conversation.turn_weights, strict=True):
        weights[answer] = pieces[0][1] if len(pieces) == 1 else _weights_of_pieces(tokens, answer, pieces)
    return weights


def _weights_of_pieces(tokens: Tokens, answer: slice, pieces: Weights) -> list[float]:
    """The weight of each token of an answer whose texts have several.

        texts     "2 + 2 = 5? "  weight 0     "No, 4."  weight 1
        tokens     2  +  2  =  5  ?           No  ,  4  .  <|im_end|>

    A token belongs to the texts in which its characters lie, blanks aside; one that lies in several gets the least of
    their weights. What the template writes before the first text and behind the last belongs to these.
    """
    start, stop = int(tokens.starts[answer.start]), int(tokens.stops[answer.stop - 1])
    places = [at for at in range(start, stop) if not tokens.text[at].isspace()]  # templates strip blanks
    said = "".join(map(tokens.text.__getitem__, places))
    sizes = [len("".join(text.split())) for text, _ in pieces]
    wanted = "".join("".join(text.split()) for text, _ in pieces)
    first = said.find(wanted)
    if first < 0 or (first and said.find(wanted, first + 1) >= 0):
        fault = f"texts of an answer have several weights, but the template does not write {wanted[:40]!r} once in it"
        raise Refusal("turn_mismatch", f"{fault}; give the whole answer one weight, or tokenised samples loss_weights")
    begins = np.array([places[first + at] for at in accumulate(sizes[:-1])])  # of the second text, and so on
    weights = []
    for begin, end in zip(tokens.starts[answer].tolist(), tokens.stops[answer].tolist(), strict=True):
        text = tokens.text[begin:end]
        begin, end = begin + len(text) - len(text.lstrip()), end - len(text) + len(text.rstrip())
        lies_in = np.searchsorted(begins, [begin, max(begin, end - 1)], side="right").tolist()
        weights.append(min(weight for _, weight in pieces[lies_in[0] : lies_in[1] + 1]))
    return weights
