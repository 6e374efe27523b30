"""One conversation → ids and labels, by the processor that the model was made with: `ProcessorEncoder`.

    template    <start_of_turn>user\n <boi> What is it?<end_of_turn>\n<start_of_turn>model\nA cat<end_of_turn>\n
    expanded    <start_of_turn>user\n \n\n<boi><image>*256<eoi>\n\n What is it?<end_of_turn>...
    tokens      the expanded text's, each with the characters that it stands for
    learnt      tokens of the answers' characters and of what ends them, and never those of an image

The chat template and the tokenizer are called as `apply_chat_template(tokenize=True)` calls them, and each image is
written as `replace_image_token` writes it; of each run of placeholders one is tokenised, and then repeated. Before the
first image the result is compared with one call of the whole processor for a sample of two images, token by token and
value by value.
"""

from __future__ import annotations

import re
import warnings
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, final

import numpy as np
import torch
from PIL import Image

from vlmpack.collate.chat_template import AnswerEnd, ChatTemplate, Span, check_characters
from vlmpack.collate.conversation import Conversation
from vlmpack.collate.encoded import Encoded, TrainOn, Visual, mask_media
from vlmpack.collate.processor_images import ProcessorImages, trial_image
from vlmpack.collate.processor_metadata import ProcessorMetadata, parts_of
from vlmpack.collate.tokenised import token_types
from vlmpack.errors import FamilyError, Refusal
from vlmpack.families.registry import family_of_processor
from vlmpack.layout.row import IGNORE

TOKEN_NAMES = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids", "labels")
"""Outputs of a processor with an entry for each token; all others are an image's."""
_TRIAL = ((120, 90), (70, 260))
"""Heights and widths of the images of the trial sample."""
_SMALLEST = (64, 64)
"""Height and width of the image in a batch without samples."""
_CUT = (800, 1100)
"""Width and height of an image that is cut into tiles."""
_NUMBERS = re.compile(r"\d+")


@final
@dataclass(frozen=True, kw_only=True)
class Tokens:
    """The n tokens of a text in which images are expanded."""

    ids: np.ndarray
    """int64 [n]."""
    starts: np.ndarray
    """int64 [n]: first character of each in the expanded text; one without any stands where the last one ended."""
    stops: np.ndarray
    """int64 [n]: the character after its last."""
    text: str
    """The expanded text."""
    images: tuple[Span, ...]
    """Characters of each image in it."""
    places: tuple[Span, ...]
    """Characters of each image's placeholder in the text before."""

    def moved(self, at: int) -> int:
        """Return the place in the expanded text of a character of the text before."""
        gained = [0, *(image[1] - place[1] for image, place in zip(self.images, self.places, strict=True))]
        return at + gained[bisect_right([stop for _, stop in self.places], at)]

    def between(self, span: Span) -> slice:
        """The tokens of these characters of the expanded text, those that reach into them included."""
        start = int(np.searchsorted(self.stops, span[0], side="right"))
        return slice(start, max(start, int(np.searchsorted(self.starts, span[1]))))


@final
@dataclass(frozen=True, kw_only=True)
class ProcessorEncoder:
    """Writes conversations with the processor's own template, tokenizer and image texts."""

    processor: Any
    """The processor, or the tokenizer of a text model."""
    metadata: ProcessorMetadata
    """The metadata of it."""
    template: ChatTemplate
    """Writes messages as text."""
    images: ProcessorImages
    """Reads images."""
    train_on: TrainOn
    """Which tokens are learnt."""
    answer_end: AnswerEnd
    """What becomes of an answer that the template does not end."""
    max_length: int | None = None
    """Tokens beyond which places to cut a sample are looked for; None: never."""

    def encode(self, conversation: Conversation, images: Sequence[Visual]) -> Encoded:
        """Write a conversation whose images were cut or measured.

        Raises:
            Refusal: the template or the tokenizer cannot write it, or it is not known which tokens are learnt.
            FamilyError: the installed processor writes images otherwise when it is called as a whole.
        """
        if images:
            assert self._is_confirmed
        if conversation.plain:
            return self._plain(conversation.plain, images)
        if self._columns:
            raise Refusal("template_error", f"it is a conversation, but {self._is_of_prefix}", of_all=True)
        text = self.template.render(conversation)
        flags = conversation.trained_turns
        spans = [] if self.train_on == "all" else self.template.answers(conversation, text)
        spans = [span for at, span in enumerate(spans) if flags is None or flags[at]]
        if end := self.answer_end.of(conversation, text, self.template, None if self.train_on == "all" else spans):
            text += end
            spans[-1:] = [(start, len(text)) for start, _ in spans[-1:]]
        tokens = self._tokenise(self._laid_out(text, len(images), is_chat=True), images)
        learnt = np.full(len(tokens.ids), self.train_on == "all")
        for span in spans:
            learnt[self._answer(tokens, span)] = True
        sample = self._encoded(tokens, learnt, images)
        if self.max_length is None or sample.num_tokens <= self.max_length:
            return sample
        ends = [tokens.between((0, tokens.moved(end))).stop for end in self.template.ends(conversation, text)]
        return replace(sample, cuts=tuple(sorted({*ends, *self._beside_images(tokens)})))

    @cached_property
    def filler(self) -> Encoded:
        """The sample of a batch without samples: a small black image, or one token of text; no targets."""
        if not self.metadata.has_vision:
            ids = np.array([self.metadata.pad_token_id], np.int64)
            return Encoded(input_ids=ids, labels=np.full_like(ids, IGNORE), types=np.zeros_like(ids))
        images = self.images.process([Image.new("RGB", _SMALLEST)])
        tokens = self._tokenise(self._laid_out(self.metadata.image_token, 1), images)
        return self._encoded(tokens, np.zeros(len(tokens.ids), bool), images)

    @cached_property
    def _columns(self) -> tuple[str, ...]:
        """Names of the columns that the model needs beside ids: that of the prefix, which is the prompt."""
        return family_of_processor(self.processor).token_columns if self.metadata.has_vision else ()

    @cached_property
    def media_tokens(self) -> tuple[str, ...]:
        """Special tokens of images, videos and audio: those that have names, and those in the text of an image.

        Of tokens that differ in their numbers, such as those of rows and columns, all are there if one is.
        """
        if not self.metadata.has_vision:
            return ()
        (image,) = self.images.process([Image.new("RGB", _CUT)])
        kinds = {_NUMBERS.sub("", token) for token in self.metadata.special_tokens if token in image.written}
        alike = [token for token in self.metadata.special_tokens if _NUMBERS.sub("", token) in kinds]
        return (*self.metadata.media_tokens, *alike)

    @cached_property
    def expert_types(self) -> str | None:
        """Name of the column of kinds of tokens by which experts are chosen; None: the family has none."""
        return family_of_processor(self.processor).expert_types if self.metadata.has_vision else None

    @property
    def _is_of_prefix(self) -> str:
        return (
            f"a {type(self.processor).__name__} writes a prompt, whose tokens see each other in both directions, and "
            "its answer: give prompt and completion as strings"
        )

    def check_not_tokenised(self) -> None:
        """Refuse samples of token ids of a family with prefixes: their lengths cannot be told from ids.

        Raises:
            Refusal: it has prefixes.
        """
        if self._columns:
            raise Refusal("bad_row", f"it has input_ids, but {self._is_of_prefix}, and images", of_all=True)

    # ------------------------------------------------------------------ tokens

    def _tokenise(self, text: str, images: Sequence[Visual], *, is_continued: bool = False) -> Tokens:
        """Expand the placeholders of a text and tokenise it.

        Args:
            text: with one placeholder an image.
            images: in their order.
            is_continued: true of a text that follows another one, which gets no beginning of its own.

        Raises:
            Refusal: it has another number of placeholders (`placeholder_mismatch`), or half a character (`bad_text`).
        """
        check_characters(text)
        expanded, places, spans = self._expand(text, images)
        tokenizer = parts_of(self.processor).tokenizer
        begins = tokenizer.bos_token is not None and text.startswith(tokenizer.bos_token)
        special = {"add_special_tokens": False} if begins or is_continued else self._text_options
        runs = [run.end() - run.start() for run in self.images.run.finditer(expanded)] if images else []
        short = self.images.run.sub(self.images.placeholder, expanded) if runs else expanded
        out = tokenizer(short, return_offsets_mapping=True, **special)
        ids, offsets = np.array(out["input_ids"], np.int64), np.array(out["offset_mapping"], np.int64).reshape(-1, 2)
        is_empty = offsets[:, 0] >= offsets[:, 1]
        reached = np.maximum.accumulate(np.where(is_empty, 0, offsets[:, 1]))
        starts, stops = (np.where(is_empty, reached, offsets[:, side]) for side in (0, 1))
        if runs:
            ids, starts, stops = self._repeated(ids, starts, stops, runs)
        return Tokens(ids=ids, starts=starts, stops=stops, text=expanded, images=spans, places=places)

    def _repeated(
        self, ids: np.ndarray, starts: np.ndarray, stops: np.ndarray, runs: Sequence[int]
    ) -> tuple[np.ndarray, ...]:
        """Repeat the one placeholder of each run, which tokenising thousands of them would give, and move what follows.

        Args:
            ids, starts, stops: int64 [n], of the text in which each run is one placeholder.
            runs: characters of each run.
        """
        width, is_run = len(self.images.placeholder), ids == self.metadata.image_token_id
        if np.count_nonzero(is_run) != len(runs):
            raise Refusal(
                "placeholder_mismatch",
                f"the tokenizer makes {np.count_nonzero(is_run)} tokens of {len(runs)} {self.images.placeholder!r}; "
                "use the tokenizer of the model, in which it is a special token",
                of_all=True,
            )
        repeats = np.ones_like(ids)
        repeats[is_run] = np.array(runs) // width
        before = np.cumsum(repeats) - repeats
        gained = (before - np.arange(len(ids))) * width
        within = (np.arange(repeats.sum()) - np.repeat(before, repeats)) * width
        return np.repeat(ids, repeats), *(np.repeat(at + gained, repeats) + within for at in (starts, stops))

    def _expand(self, text: str, images: Sequence[Visual]) -> tuple[str, tuple[Span, ...], tuple[Span, ...]]:
        """(expanded text, placeholders in the text before, images in the expanded text)."""
        token = self.metadata.image_token
        places = [match.span() for match in re.finditer(re.escape(token), text)] if token else []
        if len(places) != len(images):
            raise Refusal(
                "placeholder_mismatch",
                f"its text has {len(places)} image placeholder(s) {token!r} for {len(images)} image(s); the chat "
                "template (or the prompt) must write one for each image",
            )
        texts = self.images.texts_of(images, text)
        gains = accumulate((len(written) - len(token) for written in texts), initial=0)
        spans = [(a + gain, a + gain + len(to)) for (a, _), gain, to in zip(places, gains, texts, strict=False)]
        kept = [
            text[a:b] for a, b in zip([0, *(b for _, b in places)], [*(a for a, _ in places), len(text)], strict=True)
        ]
        expanded = "".join(part for pair in zip(kept, [*texts, ""], strict=True) for part in pair)
        return expanded, tuple(places), tuple(spans)

    @cached_property
    def _text_options(self) -> dict[str, Any]:
        """The processor's own choice of special tokens."""
        if not self.metadata.has_vision:
            return {}
        tokenizer = parts_of(self.processor).tokenizer
        options = self.processor._merge_kwargs(tokenizer_init_kwargs=tokenizer.init_kwargs)["text_kwargs"]
        return {name: options[name] for name in ("add_special_tokens",) if name in options}

    def _laid_out(self, text: str, count: int, *, is_chat: bool = False) -> str:
        """Lay a text out as the processor does before it puts images in: PaliGemma's writes more around them.

        Raises:
            Refusal: it changes what a chat template wrote, in which the answers' places would be lost.
        """
        if not count:
            return text
        blank = Image.new("RGB", _SMALLEST)
        laid_out = self.processor.prepare_inputs_layout(images=[[blank] * count], text=[text])[1][0]
        if is_chat and laid_out != text:
            raise Refusal(
                "template_error",
                f"the {type(self.processor).__name__} changes what the chat template writes, so the places of answers "
                "are not known; give prompt and completion as strings",
                of_all=True,
            )
        return laid_out

    # ------------------------------------------------------------------ a sample

    def _plain(self, plain: tuple[str, str], images: Sequence[Visual]) -> Encoded:
        """Tokenise prompt and completion apart, as generation will do it; the completion and its end are learnt."""
        prompt, completion = plain
        if self._columns and not images:
            name = type(self.processor).__name__
            raise Refusal("bad_row", f"a {name} writes no prompt without an image, and it has none; leave it out")
        if not completion.rstrip().endswith(self.metadata.eos_token):
            completion += self.metadata.eos_token
        before = self._tokenise(self._laid_out(prompt, len(images)), images)
        after = self._tokenise(completion, (), is_continued=True)
        gap = len(before.text)
        tokens = replace(
            before,
            ids=np.concatenate((before.ids, after.ids)),
            starts=np.concatenate((before.starts, after.starts + gap)),
            stops=np.concatenate((before.stops, after.stops + gap)),
            text=before.text + completion,
        )
        learnt = np.full(len(tokens.ids), self.train_on == "all")
        learnt[len(before.ids) :] = True
        sample = self._encoded(tokens, learnt, images, prefix=len(before.ids))
        return replace(sample, cuts=tuple(self._beside_images(tokens)))

    def _encoded(
        self, tokens: Tokens, learnt: np.ndarray, images: Sequence[Visual], *, prefix: int | None = None
    ) -> Encoded:
        """`prefix`: tokens of the prompt; None: all of them."""
        types = np.arange(len(tokens.ids)) >= (len(tokens.ids) if prefix is None else prefix)
        labels = np.where(learnt, tokens.ids, IGNORE)
        for around in self._around_images(tokens):
            labels[around] = IGNORE
        return Encoded(
            input_ids=tokens.ids,
            labels=mask_media(labels, tokens.ids, self.metadata),
            types=token_types(tokens.ids, self.metadata),
            images=tuple(replace(image, written="") for image in images),
            columns=dict.fromkeys(self._columns, types.astype(np.int64)),
        )

    def _answer(self, tokens: Tokens, span: Span) -> slice:
        """The tokens of an answer in the template's text.

        One that reaches into it from the header is learnt if it holds no more than blanks of the header, or if the
        template marks the answer itself: as transformers does. One that reaches out of it is learnt if it holds no more
        than blanks of what follows: of LLaVA's "4 USER:" the token " US" is not.
        """
        start, stop = tokens.moved(span[0]), tokens.moved(span[1])
        hit = tokens.between((start, stop))
        if hit.start == hit.stop:
            return hit
        before = tokens.text[tokens.starts[hit.start] : start].strip(" ")
        behind = tokens.text[stop : tokens.stops[hit.stop - 1]].strip()
        return slice(hit.start + bool(before and not self.template.marks_answers), hit.stop - bool(behind))

    def _beside_images(self, tokens: Tokens) -> list[int]:
        """Places before and after each image."""
        return [place for around in self._around_images(tokens) for place in (around.start, around.stop)]

    def _around_images(self, tokens: Tokens) -> list[slice]:
        """The tokens of each image, those that the template writes around it included."""
        ids, (start, end), slices = tokens.ids.tolist(), self._borders, []
        for span in tokens.images:
            hit = tokens.between(span)
            before, after = max(hit.start - len(start), 0), hit.stop + len(end)
            slices.append(
                slice(
                    before if ids[before : hit.start] == start else hit.start,
                    after if ids[hit.stop : after] == end else hit.stop,
                )
            )
        return slices

    @cached_property
    def _borders(self) -> tuple[list[int], list[int]]:
        """Ids of what templates write before and after an image."""
        tokenizer, metadata = parts_of(self.processor).tokenizer, self.metadata
        start, end = (
            tokenizer.encode(text, add_special_tokens=False) for text in (metadata.vision_start, metadata.vision_end)
        )
        return start, end

    # ------------------------------------------------------------------ the processor as a whole

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
        visuals = [visual for group in groups for visual in self.images.process(group)]
        ids = self._tokenise(self._laid_out(text, len(pictures)), visuals).ids
        media = family_of_processor(self.processor).media
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
            raise FamilyError(
                f"called as a whole, the installed {type(self.processor).__name__} makes {'; '.join(problems)} of a "
                "sample of two images, so its samples cannot be encoded one image at a time; use a transformers of the "
                "supported range, and the model's unmodified processor"
            )
        return True


def _tensor(visual: Visual, name: str) -> torch.Tensor | None:
    """A tensor of an image by the name under which the processor returns it; None: this image has none."""
    if name == "image_grid_thw":
        return torch.tensor([visual.grid])
    assert visual.pixels is not None
    return visual.pixels if name == "pixel_values" else visual.tensors.get(name)
