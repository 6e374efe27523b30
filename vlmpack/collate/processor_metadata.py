"""Read the metadata of a processor once: token ids, patch sizes, and how a video is written as text."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from vlmpack.data.processor import FRAMES_AS_TILES, OMNI, QWEN
from vlmpack.errors import ConfigError, FamilyError
from vlmpack.families.family import Family
from vlmpack.families.registry import family_of_processor
from vlmpack.families.videos import run_of_pairs, run_per_frame, timed_run

CHANNELS = 3

_VISION = ("<|vision_start|>", "<|vision_end|>")
BORDERS: Mapping[str, tuple[str, str]] = {
    **dict.fromkeys((*QWEN, "Lfm3VlProcessor"), _VISION),
    **dict.fromkeys(("Glm4vProcessor", "Glm46VProcessor"), ("<|begin_of_image|>", "<|end_of_image|>")),
    "Exaone4_5_Processor": ("<vision>", "</vision>"),
    "PaddleOCRVLProcessor": ("<|IMAGE_START|>", "<|IMAGE_END|>"),
    "Kimi_K25Processor": ("<|media_begin|>image<|media_content|>", "<|media_end|>"),
}
"""Texts that chat templates write around images, by processor class. Texts that the processor writes are not listed."""
PLACEHOLDERS: Mapping[str, str] = {"Llama4Processor": "<|patch|>"}
"""Tokens that stand for the parts of an image, by processor class, if `image_token` stands only for the whole image or
also appears beside these tokens."""
VIDEO_ENDS = ("<|begin_of_video|>", "<|end_of_video|>")
"""Tokens around a video in GLM-4V, which its processors also use to tell videos from images."""

IMAGES_TOGETHER = ("LlavaOnevisionProcessor",)
"""Processor classes that process an image differently if the sample has other images."""

TEXT_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")
"""Names of special tokens that every tokenizer may have."""

NO_ID = -1
"""Used in place of an id if there is no such token."""

NAMED = ("image_token", "video_token", "vision_start", "vision_end", "audio_token", "audio_start", "audio_end")
"""Names of texts that are single tokens in most families, and then have an id."""


@dataclass(frozen=True, kw_only=True)
class ProcessorMetadata:
    """Plain values of a processor. The processor itself is only needed to render text and to make image patches.

    Default values are those for a text model's tokenizer.
    """

    image_token: str = ""
    """Placeholder for one image in rendered text; in the ids it is repeated for each merged patch."""
    video_token: str = ""
    """Placeholder for one video, likewise."""
    image_token_id: int = NO_ID
    """Id of `image_token`."""
    video_token_id: int = NO_ID
    """Id of `video_token`."""
    vision_start: str = ""
    """Text before each run of placeholders: one token or several."""
    vision_end: str = ""
    """Text after each run of placeholders: one token or several."""
    vision_start_id: int = NO_ID
    """Id of `vision_start`, if it is a single token."""
    vision_end_id: int = NO_ID
    """Id of `vision_end`, if it is a single token."""
    audio_token: str = ""
    """Placeholder for one audio in rendered text; in the ids it is repeated for each audio token."""
    audio_token_id: int = NO_ID
    """Id of `audio_token`."""
    audio_start: str = ""
    """Token before each run of audio placeholders."""
    audio_end: str = ""
    """Token after each run of audio placeholders."""
    audio_start_id: int = NO_ID
    """Id of `audio_start`."""
    audio_end_id: int = NO_ID
    """Id of `audio_end`."""
    turn_start_id: int | None
    """Id of ChatML's `<|im_start|>`; None: the tokenizer has no such token."""
    turn_end_id: int | None
    """Id of ChatML's `<|im_end|>`; None: the tokenizer has no such token."""
    assistant_ids: tuple[int, ...]
    """Ids of the word "assistant", between `<|im_start|>` and the newline."""
    newline_ids: frozenset[int]
    """Ids of all tokens that begin with a newline: BPE may merge the header's newline with the text after it."""
    eos_token: str
    """Token that ends an answer outside any chat template."""
    bos_token_id: int = NO_ID
    """Id of the token that begins a text."""
    pad_token_id: int
    """Id used for padding."""
    vocab_size: int
    """Upper bound (exclusive) for token ids."""
    patch_size: int = 1
    """Side of a patch in pixels."""
    merge_size: int = 1
    """Side of one token in patches."""
    temporal_patch_size: int = 1
    """Frames in a patch."""
    frame_timestamps: bool = False
    """True: a video is written frame by frame with timestamps (Qwen3-VL, GLM-4V). False: as one run of placeholders."""
    seconds_per_grid: bool = False
    """True: the model takes the seconds from one video grid to the next (Qwen2.5-VL, Qwen-Omni)."""
    by_processor: bool = False
    """True: the processor and its template encode samples. False: vlmpack encodes them by Qwen's rules."""
    images_together: bool = False
    """True: the processor processes an image differently if the sample has other images."""
    border_ids: tuple[int, ...] = ()
    """Ids of tokens around images, besides `image_token_id`, that are never trained on."""
    has_grids: bool = False
    """True: a processor that encodes samples itself returns images as patches with one grid each."""
    frames_as_tiles: bool = False
    """True: a video is written, and passed to the model, as one image with a tile for each frame."""
    frames_per_token: int = 1
    """Number of video frames that share one token, for a processor that encodes samples itself."""
    video_ends: tuple[int, ...] = ()
    """Ids of the tokens that start and end a video, if videos share the image placeholder; (): videos have their own
    placeholder, or there are no videos."""
    special_tokens: tuple[str, ...] = ()
    """The tokenizer's special tokens."""
    media_tokens: tuple[str, ...] = ()
    """Tokens that the processor or the tokenizer names as tokens of images, videos or audio."""

    @property
    def has_vision(self) -> bool:
        """Whether there are images and videos. A text model has only a tokenizer."""
        return self.image_token_id != NO_ID

    @property
    def has_audio(self) -> bool:
        """Whether there is audio."""
        return self.audio_token_id != NO_ID

    @property
    def patch_dim(self) -> int:
        """Number of values in one patch (C)."""
        return CHANNELS * self.temporal_patch_size * self.patch_size**2

    @property
    def media_ids(self) -> tuple[int, ...]:
        """Ids that are never trained on."""
        ids = self.image_token_id, self.video_token_id, self.vision_start_id, self.vision_end_id
        audio = (self.audio_token_id, self.audio_start_id, self.audio_end_id) if self.has_audio else ()
        return *ids, *audio, *self.border_ids


@dataclass(frozen=True, kw_only=True)
class ProcessorParts:
    """The parts of a processor."""

    tokenizer: Any
    """Converts text to ids."""
    image_processor: Any = None
    """Converts images to patches; None: only a tokenizer was given."""
    feature_extractor: Any = None
    """Converts audio to log-mel frames; None: there is none."""
    video_processor: Any = None
    """Holds the settings for video files; None: it is missing, since it needs torchvision."""


def parts_of(processor: Any) -> ProcessorParts:
    """Return the parts of a processor, or of a text model's tokenizer."""
    from transformers import PreTrainedTokenizerBase

    if isinstance(processor, PreTrainedTokenizerBase):
        return ProcessorParts(tokenizer=processor)
    names = ("tokenizer", "image_processor", "feature_extractor", "video_processor")
    return ProcessorParts(**{name: getattr(processor, name, None) for name in names})


def pixel_bounds(part: Any) -> tuple[int, int]:
    """Return the minimum and maximum number of pixels to which an image or video processor resizes.

    The bounds come from its `size`, or from `min_pixels` and `max_pixels` if they were set on it after loading and the
    installed transformers supports that.
    """
    size, set_later = part.size, {name: getattr(part, name, None) for name in ("min_pixels", "max_pixels")}
    if any(value is not None for value in set_later.values()):
        size = part._standardize_kwargs(size=size, **set_later)["size"]
    return size["shortest_edge"], size["longest_edge"]


def read_processor(processor: Any, *, vocab_size: int | None = None) -> ProcessorMetadata:
    """Read the metadata of a processor of any family, or of a text model's tokenizer.

    Args:
        processor: the processor, as made by `AutoProcessor` or `vlmpack.testing.tiny_processor`; for a text model, its
            tokenizer.
        vocab_size: upper bound (exclusive) for token ids; None: the tokenizer's number of entries.

    Raises:
        FamilyError: the processor belongs to no supported family.
        ConfigError: the tokenizer lacks a token that every Qwen-VL tokenizer has, or an end-of-text token.
    """
    from transformers import PreTrainedTokenizerBase

    if isinstance(processor, PreTrainedTokenizerBase):
        has_turns = {"<|im_start|>", "<|im_end|>"} <= processor.get_vocab().keys()
        is_chatml = processor.chat_template is None or "<|im_start|>" in str(processor.chat_template)
        settings: dict[str, Any] = {} if has_turns and is_chatml else {"by_processor": True}
    elif class_in(processor, (*QWEN, *OMNI)):
        settings = _qwen_settings(processor)
    else:
        settings = processor_settings(processor)
    tokenizer = parts_of(processor).tokenizer
    if tokenizer.eos_token is None:
        raise ConfigError("the tokenizer has no eos_token, with which a text ends; set tokenizer.eos_token")
    vocab = tokenizer.get_vocab()
    ids = {f"{name}_id": vocab[settings[name]] for name in NAMED if settings.get(name) in vocab}
    special = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    return ProcessorMetadata(
        turn_start_id=vocab.get("<|im_start|>"),
        turn_end_id=vocab.get("<|im_end|>"),
        assistant_ids=tuple(tokenizer("assistant", add_special_tokens=False)["input_ids"]),
        newline_ids=frozenset(i for token, i in vocab.items() if token.startswith(("Ċ", "\n"))),
        eos_token=tokenizer.eos_token,
        bos_token_id=NO_ID if tokenizer.bos_token_id is None else tokenizer.bos_token_id,
        pad_token_id=tokenizer.pad_token_id or 0,
        vocab_size=len(tokenizer) if vocab_size is None else vocab_size,
        special_tokens=tuple(dict.fromkeys((*special, *tokenizer.all_special_tokens))),
        **{**ids, **settings},
    )


def _qwen_settings(processor: Any) -> dict[str, Any]:
    videos, parts = family_of_processor(processor).videos, parts_of(processor)
    tokens = {"image_token": processor.image_token, "video_token": processor.video_token}
    tokens |= dict(zip(("vision_start", "vision_end"), _VISION, strict=True))
    if class_in(processor, OMNI):
        tokens |= {"vision_start": processor.vision_bos_token, "vision_end": processor.vision_eos_token}
        tokens |= {"audio_token": processor.audio_token, "audio_start": processor.audio_bos_token}
        tokens |= {"audio_end": processor.audio_eos_token}
    vocab = parts.tokenizer.get_vocab()
    if missing := [token for token in tokens.values() if token not in vocab]:
        fault = f"the processor's tokenizer has no token {missing[0]!r}"
        raise ConfigError(f"{fault}; use the tokenizer of a Qwen-VL model")
    return {
        **tokens,
        "media_tokens": tuple(tokens.values()),
        "patch_size": parts.image_processor.patch_size,
        "merge_size": parts.image_processor.merge_size,
        "temporal_patch_size": parts.image_processor.temporal_patch_size,
        "frame_timestamps": videos is run_per_frame,
        "seconds_per_grid": videos is timed_run or bool(class_in(processor, OMNI)),
    }


# ---------------------------------------------------------------------- encoding by the processor itself


def processor_settings(processor: Any) -> dict[str, Any]:
    """Read the settings for a `ProcessorMixin` of any family with images that encodes samples itself.

    Raises:
        FamilyError: the processor belongs to no supported family, or does not write images as text.
    """
    family, tokenizer = family_of_processor(processor), parts_of(processor).tokenizer
    try:
        image_token, image_ids = processor.image_token, list(processor.image_token_ids)
        inspect.signature(processor._merge_kwargs).bind(tokenizer_init_kwargs={}, return_tensors="pt")
    except (AttributeError, TypeError) as error:
        fault = f"the {type(processor).__name__} of the installed transformers cannot be asked how it writes an image"
        raise FamilyError(f"{fault} ({error}); use transformers 5.23 or later") from error
    vocab = tokenizer.get_vocab()
    if (named := class_in(processor, PLACEHOLDERS)) and PLACEHOLDERS[named] in vocab:
        image_ids = [vocab[PLACEHOLDERS[named]], *image_ids]
    start, end = BORDERS.get(class_in(processor, BORDERS), ("", ""))
    placeholder = tokenizer.convert_ids_to_tokens(image_ids[0])
    return {
        "by_processor": True,
        "media_tokens": tuple(dict.fromkeys((image_token, placeholder, *_named_media(processor)))),
        "image_token": image_token,
        "image_token_id": image_ids[0],
        "images_together": bool(class_in(processor, IMAGES_TOGETHER)),
        "border_ids": tuple(image_ids[1:]),
        "vision_start": start,
        "vision_end": end,
        "merge_size": parts_of(processor).image_processor.merge_size if family.has_grids else 1,
        "has_grids": family.has_grids,
        **_video_settings(processor, family, vocab),
    }


def _video_settings(processor: Any, family: Family, vocab: Mapping[str, int]) -> dict[str, Any]:
    """Read the video placeholder, or the tokens around a video whose frames use the image placeholder."""
    as_tiles = bool(class_in(processor, FRAMES_AS_TILES))
    if not (family.has_videos or as_tiles):
        return {}
    named: dict[str, Any] = {"video_token": processor.video_token}
    if not as_tiles and not family.videos_as_images:
        named["frame_timestamps"] = family.videos is run_per_frame
        return {**named, "frames_per_token": 2 if family.videos is run_of_pairs else 1}
    named["video_token_id"] = NO_ID  # frames are written with the image's placeholder
    if as_tiles:
        return {**named, "frames_as_tiles": True}
    ends = tuple(vocab[token] for token in VIDEO_ENDS if token in vocab)
    return {**named, "video_ends": ends if len(ends) == len(VIDEO_ENDS) else (), "frame_timestamps": True}


def class_in(processor: Any, names: Collection[str]) -> str:
    """Return the first name in `names` among a processor's class and its base classes; "": none."""
    return next((cls.__name__ for cls in type(processor).__mro__ if cls.__name__ in names), "")


def _named_media(processor: Any) -> tuple[str, ...]:
    """Return the media tokens that a processor or its tokenizer names in an attribute, such as `boi_token`."""
    of_tokenizer = parts_of(processor).tokenizer.special_tokens_map
    named = {name: token for name, token in of_tokenizer.items() if name not in TEXT_TOKENS} | vars(processor)
    return tuple(token for name, token in named.items() if name.endswith("_token") and isinstance(token, str))
