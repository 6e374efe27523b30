"""Synthetic samples for tests, the probe, the benchmarks and the demo.

A sample is a dictionary with the tensors that the family's processor returns for one conversation, without the batch
axis. For a Qwen-VL model:

    input_ids [L], labels [L] (not shifted, -100 on media), mm_token_type_ids [L] (0 text, 1 image, 2 video; not in text
    models); for images and videos pixel_values [P, C], image_grid_thw [N, 3], pixel_values_videos, video_grid_thw,
    second_per_grid_ts [N] (Qwen2.5-VL; in Qwen-Omni video_second_per_grid); for audio input_features [N, mel, F] and
    feature_attention_mask [N, F]

    samples = mixed_samples(config, seed=0)          # text only, one image, several images, ...
    batch = padded(samples, side="left")             # PaddedBatch
    reference = [model(**alone(sample)) for sample in samples]
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod
from typing import Any, ClassVar, Literal, final

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from vlmpack.collate.collator import VLMCollator
from vlmpack.errors import ConfigError, SampleError, VlmpackError
from vlmpack.families.family import Family
from vlmpack.families.media import media_of_row
from vlmpack.families.pixels import Draw, Tensors, thumbnail_and_tiles
from vlmpack.families.registry import family_named, family_of_processor
from vlmpack.families.spans import prefix_length
from vlmpack.families.tiles import Join, tiles_of_images
from vlmpack.families.videos import run_of_pairs
from vlmpack.layout.batch import MEDIA_KEYS, HostMetadata, Media, PaddedBatch
from vlmpack.layout.media import IMAGE, TEXT, Expected, Grid, MediaTable, place
from vlmpack.layout.row import IGNORE, pack
from vlmpack.layout.segments import Segments
from vlmpack.testing.models import AUDIO_TOKENS, MEDIA_TOKENS
from vlmpack.testing.receipts import SMALLEST_LEGIBLE, SyntheticReceipts

Kind = Literal["text", "image", "images", "video", "images_and_video", "audio", "everything"]

KINDS: tuple[Kind, ...] = ("text", "image", "images", "video", "images_and_video")
AUDIO_KINDS: tuple[Kind, ...] = ("audio", "everything")
"""Additional kinds for families that take audio: two audios; an image, a video and an audio."""
TOKEN_KEYS = ("input_ids", "mm_token_type_ids", "moe_mm_token_type_ids", "token_type_ids", "labels")
ENDS_OF_MEDIA = tuple(f"{name}_{end}_token_id" for name in ("image", "video") for end in ("start", "end"))
IMAGE_TOKENS_KEY = "image_tokens"
"""Key of int64 [N]: placeholders of each image, in families whose images have no grids. It is not a model input."""
LONG_TEXT = 140
"""Tokens of a long text: above 128 tokens, kernels take another path."""
UNREAD = 1e4
"""The value of padding frames after an audio: nothing may read them."""
IMAGE_TOKENS, FRAME_TOKENS = 24, 8
"""The most tokens of an image and of a video frame in `processed_samples`."""
SMALL = (64, 64)
"""Size in pixels of images in `processed_samples` if the processor decides on tiles: small enough for one tile."""


class Sample(dict[str, torch.Tensor]):
    """A processor's output for one conversation, without the batch axis, and the model that it is for."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], family: Family | None = None, config: Any = None) -> None:
        super().__init__(tensors)
        self.family = family
        """The model's family; None: the sample has no media, or they are joined along their first axis."""
        self.config = config
        """The model's configuration; None: unknown, so the modality of tokens is unknown, too."""


def sample_like(sample: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor]) -> Sample:
    """Make a sample from `tensors`, with the family and configuration of `sample` (a plain dictionary has none)."""
    return Sample(tensors, *((sample.family, sample.config) if isinstance(sample, Sample) else ()))


def join_tensors(parts: Sequence[Mapping[str, torch.Tensor]], family: Family | None) -> dict[str, torch.Tensor]:
    """Join the tensors of samples or of media by name, in order; None: along the first axis."""
    names, joins = dict.fromkeys(name for part in parts for name in part), {} if family is None else family.media
    return {name: joins.get(name, Join())([part[name] for part in parts if name in part]) for name in names}


def build_sample(
    config: Any,
    *,
    stretches: Sequence[int],
    image_grids: Sequence[Grid] = (),
    video_grids: Sequence[Grid] = (),
    seconds: Sequence[float] = (),
    audio_frames: Sequence[int] = (),
    videos_first: bool = False,
    labeled: int | None = None,
    several: bool | None = None,
    seed: int = 0,
) -> Sample:
    """Build a sample: text, image, text, image, ..., text, video, ..., text; audios follow the first image or video.

    If the sample begins with text, the first token is labeled too, although nothing predicts it when the sample is
    alone. A packed row that forgets to mask this label predicts it from the previous sample, which tests can then see.
    (In a left-padded batch, Hugging Face's loss predicts it from padding, so that batch is not a valid reference.)

    Args:
        config: the model's configuration. Its family decides how media are written.
        stretches: number of text tokens, 0 or more, before each medium and at the end: one entry more than media.
        image_grids: (frames, rows, columns) of patches of each image.
        video_grids: (frames, rows, columns) of patches of each video.
        seconds: for each video, the seconds from one grid to the next (Qwen2.5-VL, Qwen-Omni).
        audio_frames: log-mel frames of each audio.
        videos_first: put the videos before the images.
        labeled: number of tokens to label at the end, beside the first token; None: label the first and the last
            stretch of text. In families with a prefix (PaliGemma), this is also the length of the suffix; None: half of
            the last stretch.
        several: write images in the form for samples with several images; None: if there are several.
        seed: seed of words and pixels.
    """
    assert len(stretches) == len(image_grids) + len(video_grids) + len(audio_frames) + 1
    family = family_named(config.model_type)
    rng = torch.Generator().manual_seed(seed + 1)
    several = len(image_grids) > 1 if several is None else several

    def draw(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, generator=rng)

    tensors: Tensors = {}
    if family.has_grids:
        images = [_written(config, config.image_token_id, [family.media_tokens([x], config)]) for x in image_grids]
        videos = [_video(config, family, grid) for grid in video_grids]
    else:
        tiles = [_image_of_tiles(config, family, grid, draw, several=several) for grid in image_grids]
        clips = [_video_of_tiles(config, family, grid, draw) for grid in video_grids]
        images, videos = [ids for ids, _ in tiles], [ids for ids, _ in clips]
        tensors = join_tensors([tensors for _, tensors in (*tiles, *clips)], family)
        if images:
            counts = {"batch_num_images": torch.tensor([len(images)])} if "batch_num_images" in family.media else {}
            tensors |= {**counts, IMAGE_TOKENS_KEY: torch.tensor([ids.count(config.image_token_id) for ids in images])}
    audios = [_audio(config, family, frames) for frames in audio_frames]
    visual = videos + images if videos_first else images + videos
    media = [*visual[:1], *audios, *visual[1:], []]
    ids: list[int] = []
    targets: list[bool] = []
    words = word_ids(config)
    for i, (length, placeholders) in enumerate(zip(stretches, media, strict=True)):
        ids += [*torch.randint(words.start, words.stop, (length,), generator=rng).tolist(), *placeholders]
        targets += [i in (0, len(stretches) - 1)] * length + [False] * len(placeholders)
    if labeled is not None:
        targets = [i == 0 or i >= len(ids) - labeled for i in range(len(ids))]
    input_ids = torch.tensor(ids)
    sample: Tensors = {"input_ids": input_ids}
    sample |= {"labels": torch.where(torch.tensor(targets, dtype=torch.bool), input_ids, IGNORE)}
    if family.token_types is not None:
        sample[family.token_types] = family.media_types(input_ids, config)
    sample |= family.expert_types_of(input_ids, config)
    suffix = (stretches[-1] + 1) // 2 if labeled is None else labeled
    for name in family.token_columns:
        sample[name] = (torch.arange(len(ids)) >= len(ids) - suffix).long()
    if not family.has_grids:
        return Sample(sample | tensors, family, config)
    for name, pixels, grids in (
        ("image_grid_thw", "pixel_values", image_grids),
        ("video_grid_thw", "pixel_values_videos", video_grids),
    ):
        if grids:
            sample[name] = torch.tensor(grids)
            sample[pixels] = draw(sum(map(prod, grids)), *family.patch_shape(config))
    if audio_frames:
        mask = (torch.arange(max(audio_frames)) < torch.tensor(audio_frames)[:, None]).long()
        frames = draw(len(mask), config.audio_config.num_mel_bins, mask.shape[1])
        sample["input_features"] = frames.where(mask[:, None].bool(), UNREAD)
        sample["feature_attention_mask"] = mask
    name = "video_second_per_grid" if "video_second_per_grid" in family.media else "second_per_grid_ts"
    if video_grids and (name in family.media or hasattr(config.vision_config, "tokens_per_second")):
        sample[name] = torch.tensor(seconds, dtype=torch.float32)
    return Sample(sample, family, config)


def random_sample(
    config: Any,
    kind: Kind = "image",
    *,
    seed: int = 0,
    text: tuple[int, int] = (1, 9),
    side: tuple[int, int] = (1, 4),
    frames: tuple[int, int] = (2, 4),
) -> Sample:
    """Draw a random sample of a kind.

    `text`, `side` and `frames` are inclusive ranges: tokens of each stretch of text, height and width of images and
    videos in merged tokens, and video frames.
    """
    rng = torch.Generator().manual_seed(seed)
    family = family_named(config.model_type)
    merge = family.merge(config)

    def pick(bounds: tuple[int, int]) -> int:
        return int(torch.randint(bounds[0], bounds[1] + 1, (), generator=rng))

    images = {"image": 1, "images": 2 + pick((0, 1)), "images_and_video": 1, "everything": 1}.get(kind, 0)
    videos = {"video": 1, "images_and_video": 1, "everything": 1}.get(kind, 0)
    image_grids = [(1, merge * pick(side), merge * pick(side)) for _ in range(images)]
    video_grids = [(pick(frames), merge * pick(side), merge * pick(side)) for _ in range(videos)]
    if family.videos is run_of_pairs:
        video_grids = [(count + count % 2, rows, columns) for count, rows, columns in video_grids]
    seconds = [pick((1, 9)) * 0.25 for _ in video_grids]
    audio_frames = [pick(frames_of(config)) for _ in range({"audio": 2, "everything": 1}.get(kind, 0))]
    stretches = [pick(text) for _ in range(images + videos + len(audio_frames) + 1)]
    if kind == "text":
        stretches = [2 + 3 * stretches[0]]  # at least one target, even if `text` allows an empty stretch
    media = {"image_grids": image_grids, "video_grids": video_grids, "seconds": seconds, "audio_frames": audio_frames}
    return build_sample(config, stretches=stretches, seed=seed, **media)


def kinds_of(config: Any) -> tuple[Kind, ...]:
    """Return the kinds of samples that a model with this configuration takes."""
    family = family_named(config.model_type)
    visual = KINDS if family.has_videos else KINDS[:3] if family.has_vision else KINDS[:1]
    visual = visual[:4] if family.videos_as_images else visual
    return (*visual, *AUDIO_KINDS) if family.has_audio else visual


def mixed_samples(config: Any, *, seed: int = 0, kinds: Sequence[Kind] | None = None, **ranges: Any) -> list[Sample]:
    """Draw one sample of each kind; None: four samples, with images and audio if the model takes them."""
    if kinds is None:
        family = family_named(config.model_type)
        kinds = ("image", "text", "images", "image") if family.has_vision else ("text",) * 4
        kinds = ("image", "text", "audio", "everything") if family.has_audio else kinds
    return [random_sample(config, kind, seed=1000 * seed + i, **ranges) for i, kind in enumerate(kinds)]


def synthetic_samples(config: Any) -> list[Sample]:
    """Build a fixed set of samples of different lengths from a configuration.

    One image, a text, two images, then a video and two samples with audio if the model takes them; three texts for a
    text model.
    """
    family = family_named(config.model_type)
    if not family.has_vision:
        return [build_sample(config, stretches=[2 * n], labeled=n, seed=n) for n in (5, 11, 8)]
    side = family.merge(config)

    def grid(rows: int, columns: int, frames: int = 1) -> Grid:
        return frames, rows * side, columns * side

    samples = [
        build_sample(config, stretches=[5, 5], image_grids=[grid(2, 3)], seed=1),
        build_sample(config, stretches=[10], labeled=5, seed=2),
        build_sample(config, stretches=[4, 0, 4], image_grids=[grid(5, 2), grid(1, 3)], seed=3),
    ]
    if family.has_videos:
        clip = [grid(2, 1, frames=2)]
        samples.append(build_sample(config, stretches=[3, 4], video_grids=clip, seconds=[1.5], seed=4))
    if family.has_audio:
        fewest, most = frames_of(config)
        samples.append(build_sample(config, stretches=[3, 3], audio_frames=[fewest], seed=6))
        samples.append(build_sample(config, stretches=[3, 3, 3], audio_frames=[most, fewest], seed=7))
    return samples


def probe_samples(config: Any, processor: Any = None) -> list[Sample]:
    """Build the samples of a probe, with a processor or from random ids and pixels."""
    samples = synthetic_samples(config) if processor is None else processed_samples(processor)
    return with_adversarial_lengths(samples, config)


def processed_samples(processor: Any) -> list[Sample]:
    """Build samples with a processor: one image, a text, two images, and if it takes them a video and two audios.

    Each audio has a sample of its own. Pixels are float32.
    """
    collator = VLMCollator(processor)
    receipts = SyntheticReceipts(num=3, scale=SMALLEST_LEGIBLE)
    records = [receipts[i] for i in range(3)]
    totals = [json.loads(record["ground_truth"])["gt_parse"]["total"]["total_price"] for record in records]
    by_grid = not collator.metadata.by_processor
    images = [record["image"] if by_grid else record["image"].resize(SMALL) for record in records]
    bounds = _bounds(processor.image_processor, IMAGE_TOKENS) if by_grid else {}
    first, *others = ({"type": "image", "image": image, **bounds} for image in images)
    samples = [_processed(collator, "What is the total?", totals[0], first)]
    try:
        samples.append(_processed(collator, "What is two times 14,500?", "It is 29,000."))
    except SampleError:  # the processor needs an image in every prompt
        samples.append(_processed(collator, "And here?", totals[1], others[0]))
    answer = f"They are {totals[1]} and {totals[2]}."
    samples.append(_processed(collator, "And the totals of these two?", answer, *others))
    if by_grid:
        frames = [records[i]["image"].resize((160, 200)) for i in (0, 0, 1, 1)]  # a long receipt would be too thin
        video = {"type": "video", "video": frames, **_bounds(processor.image_processor, FRAME_TOKENS)}
        with suppress(VlmpackError):  # the processor takes no videos
            samples.append(_processed(collator, "What is shown?", "Two receipts.", video))
    if collator.metadata.has_audio:
        rng = np.random.default_rng(0)
        for length in (18_000, 21_001):  # more than a second
            noise = rng.normal(scale=0.1, size=length).astype(np.float32)
            samples.append(_processed(collator, "What is heard?", "Some noise.", {"type": "audio", "audio": noise}))
    return samples


def _bounds(image_processor: Any, most_tokens: int) -> dict[str, int]:
    """Return the pixel limits of an image or a video frame of 4 to `most_tokens` tokens."""
    area = (image_processor.patch_size * image_processor.merge_size) ** 2
    return {"min_pixels": 4 * area, "max_pixels": most_tokens * area}


def _processed(collator: VLMCollator, question: str, answer: str, *media: dict[str, Any]) -> Sample:
    batch = collator.collate([_record(collator.processor, question, answer, media)])
    tensors, family = batch.to_hf(), family_of_processor(collator.processor)
    if family.token_types != "mm_token_type_ids" and (types := tensors.pop("mm_token_type_ids", None)) is not None:
        tensors |= {} if family.token_types is None else {family.token_types: types}
    names = dict.fromkeys((*MEDIA_KEYS, *family.media))
    sample = {name: tensors[name][0] for name in (*TOKEN_KEYS, *family.token_columns) if name in tensors}
    sample |= {name: tensors[name] for name in names if name in tensors}
    table = None if batch.metadata is None else batch.metadata.media
    if table is not None and (counts := [image.tokens for image in table.images if image.grid is None]):
        sample[IMAGE_TOKENS_KEY] = torch.tensor(counts)
    sample["labels"] = torch.cat([sample["input_ids"][:1], sample["labels"][1:]])
    floats = {name: tensor.float() for name, tensor in sample.items() if tensor.is_floating_point()}
    return Sample({**sample, **floats}, family)


def _record(processor: Any, question: str, answer: str, media: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return a conversation, or a prompt with its completion if the processor has no chat template."""
    if processor.chat_template is None:
        images = [medium["image"] for medium in media]
        prompt = processor.image_token * len(images) + question
        return {"prompt": prompt, "completion": answer, **({"images": images} if images else {})}
    user = {"role": "user", "content": [*media, {"type": "text", "text": question}]}
    assistant = {"role": "assistant", "content": [{"type": "text", "text": answer}]}
    return {"messages": [user, assistant]}


def with_adversarial_lengths(samples: Sequence[Sample], config: Any) -> list[Sample]:
    """Add another sample with the first one's length and a text of more than 128 tokens.

    Kernels and layouts take other paths for more samples, long samples, and samples of equal length.
    """
    first, second, *others = samples
    long = build_sample(config, stretches=[LONG_TEXT], labeled=LONG_TEXT // 2, seed=5)
    return [first, perturbed(first, config), second, long, *others]


def perturbed(sample: Sample, config: Any) -> Sample:
    """Replace every word, pixel and audio frame with another one; keep shapes, labels and placeholders."""
    words, ids = word_ids(config), sample["input_ids"]
    is_word = (ids >= words.start) & (ids < words.stop)
    others = torch.where(is_word, words.start + (ids - words.start + 7) % len(words), ids)
    family = family_named(config.model_type)
    names = (*family.pixel_names, *["input_features"] * family.has_audio)
    values = {name: 1.0 - sample[name] for name in names if name in sample}
    return sample_like(sample, {**sample, "input_ids": others, **values})


def word_ids(config: Any) -> range:
    """Return the longest range of token ids without special tokens."""
    text = family_named(config.model_type).text_config(config)
    settings = {**text.to_dict(), **config.to_dict()}
    indices = ("image_token_index", "video_token_index", "audio_token_index")
    names = (*MEDIA_TOKENS, *AUDIO_TOKENS, *ENDS_OF_MEDIA, *indices)
    ids = [settings.get(name) for name in (*names, "pad_token_id", "bos_token_id", "eos_token_id")]
    special = {i for value in ids if value is not None for i in (value if isinstance(value, list) else [value])}
    edges = sorted({-1, *(i for i in special if i < text.vocab_size), text.vocab_size})
    return max((range(start + 1, stop) for start, stop in pairwise(edges)), key=len)


# ---------------------------------------------------------------------- samples that share prefixes
#
# Pieces are joined along the paths of a tree:
#
#     pieces    0: an image and text   1: text   2: a long text   3: two images   4: one token   5: 0, other pixels
#     samples   0 | 0 1 | 0 1 | 0 2 3 | 0 2 4 | 5 3


@final
@dataclass(frozen=True, kw_only=True)
class Branches:
    """Pieces of samples, and the paths along which they are joined."""

    pieces: tuple[Sample, ...]
    """The pieces. Each one is a complete sample."""
    names: ClassVar = ("the prefix", "a branch", "an inner node", "a leaf", "one token", "a stranger")
    """Readable names of the pieces."""
    paths: ClassVar = ((0,), (0, 1), (0, 1), (0, 2, 3), (0, 2, 4), (5, 3))
    """For each sample, the indices of its pieces, in order. The third sample's first piece is not trained on."""

    @property
    def samples(self) -> list[Sample]:
        """Build every sample."""
        samples = [joined([self.pieces[at] for at in path]) for path in self.paths]
        samples[2]["labels"][: len(self.pieces[0]["input_ids"])] = IGNORE
        return samples

    def exchanged(self, piece: int, config: Any) -> tuple[list[Sample], list[int]]:
        """Exchange one piece's pixels, and its words after the first medium, in all samples that contain it.

        Words before the first medium stay, so samples share as many tokens as before.

        Returns:
            The samples, and each one's number of tokens before the piece; all of them if it does not contain the piece.
        """
        pieces = [_other_words(each, config) if at == piece else each for at, each in enumerate(self.pieces)]
        before = [path[: path.index(piece)] if piece in path else path for path in self.paths]
        lengths = [sum(len(self.pieces[at]["input_ids"]) for at in path) for path in before]
        return Branches(pieces=(*pieces,)).samples, lengths


def branches_of(samples: Sequence[Sample], config: Any) -> Branches:
    """Build samples that share prefixes from the samples of a probe.

    The tree has three levels, an inner node where a sample ends, a branch of one token, two equal samples, and a
    stranger: a sample whose first piece is the prefix with other pixels (in text models, with other words).

    Args:
        samples: at least five samples: the first with an image if the model takes images, the third a text, the fourth
            a long text; the second is not used.
        config: the model's configuration.

    Raises:
        ConfigError: there are fewer than five samples.
    """
    family = family_named(config.model_type)
    if len(samples) < 5:
        raise ConfigError(
            f"branches_of takes five samples, the third and the fourth of them texts, and got {len(samples)}: those of "
            "mixed_samples and of synthetic_samples become enough by with_adversarial_lengths(samples, config)"
        )
    first, _, text, long, last = samples[:5]
    if any(join.counts_images for join in family.media.values()) and last.keys() & family.media.keys():
        # an image is written differently beside others
        last = build_sample(config, stretches=[len(last["input_ids"])], seed=len(last["input_ids"]))
    pixels = {name: 2.0 - first[name] for name in ("pixel_values", "pixel_values_videos") if name in first}
    stranger = sample_like(first, {**first, **pixels}) if pixels else _other_words(_other_words(first, config), config)
    return Branches(pieces=(first, text, long, last, build_sample(config, stretches=[1], seed=6), stranger))


def joined(pieces: Sequence[Sample]) -> Sample:
    """Join pieces into one sample, one after the other, with their media in the same order."""
    family = pieces[0].family
    laid = join_tensors(pieces, family)
    if family is not None:
        for name in laid.keys() & {name for name, join in family.media.items() if join.counts_images}:
            laid[name] = laid[name].sum(0, keepdim=True)
        for name in family.token_columns:
            laid[name] = laid[name].cummax(0).values  # only the first piece's prefix remains a prefix
    return sample_like(pieces[0], laid)


def _other_words(piece: Sample, config: Any) -> Sample:
    """Exchange pixels, and words after the first medium (all words if there is no medium).

    Labels follow the new words, because the label of a shared token can only be its id.
    """
    other = perturbed(piece, config)
    types = family_named(config.model_type).media_types(piece["input_ids"], config)
    is_behind = (types > 0).cumsum(0) > 0 if types.any() else torch.ones_like(types, dtype=torch.bool)
    ids = torch.where(is_behind, other["input_ids"], piece["input_ids"])
    labels = torch.where(other["labels"] == IGNORE, IGNORE, ids)
    return sample_like(other, {**other, "input_ids": ids, "labels": labels})


# ---------------------------------------------------------------------- one sample, or several in a batch


def alone(sample: Sample, *, labels: bool = True) -> dict[str, torch.Tensor]:
    """Return the keyword arguments with which a Hugging Face model computes this sample alone."""
    tokens = {name: sample[name][None] for name in TOKEN_KEYS if name in sample and (labels or name != "labels")}
    family = sample.family if isinstance(sample, Sample) else None
    if family is not None and family.positions_rule.timed:  # the model derives positions from the mask
        tokens["attention_mask"] = torch.ones_like(tokens["input_ids"])
    return {**tokens, **_media(sample)}


def _media(sample: Sample) -> dict[str, torch.Tensor]:
    """Return the media tensors. Entries that are not tensors, such as an evaluation's sample id, are left out."""
    others = {name: value for name, value in sample.items() if name not in (*TOKEN_KEYS, IMAGE_TOKENS_KEY)}
    return {name: value for name, value in others.items() if isinstance(value, torch.Tensor)}


def padded(
    samples: Sequence[Sample], side: Literal["right", "left"] = "right", *, metadata: bool = True
) -> PaddedBatch:
    """Pad the samples to a batch; `metadata=False` leaves out the host metadata that a collator adds."""

    def stack(name: str, fill: int = 0) -> torch.Tensor:
        rows = [sample[name] for sample in samples]
        return pad_sequence(rows, batch_first=True, padding_value=fill, padding_side=side)

    family, types = _family_of(samples), "mm_token_type_ids"
    columns = () if family is None else (*family.token_columns, *filter(None, (family.expert_types,)))
    real = [torch.ones_like(sample["input_ids"]) for sample in samples]
    batch = PaddedBatch(
        input_ids=stack("input_ids"),
        attention_mask=pad_sequence(real, batch_first=True, padding_side=side),
        labels=stack("labels", IGNORE),
        mm_token_type_ids=stack(types) if all(types in sample for sample in samples) else None,
        extras={name: stack(name) for name in columns},
        media=media_of(samples),
    )
    return replace(batch, metadata=_metadata_of(batch, samples)) if metadata else batch


def _family_of(samples: Sequence[Sample]) -> Family | None:
    """Return the family of the samples; None: they are plain dictionaries."""
    return next((x.family for x in samples if isinstance(x, Sample) and x.family is not None), None)


def media_of(samples: Sequence[Sample]) -> Media:
    """Join pixels, grids and other media tensors of all samples, in order."""
    joined = join_tensors([*map(_media, samples)], _family_of(samples))
    return Media.from_hf(joined, names=joined.keys())


def _metadata_of(batch: PaddedBatch, samples: Sequence[Sample]) -> HostMetadata:
    """Derive the host metadata that a collator would add to the batch of these samples."""
    row, family = pack(batch, keep_empty=True), _family_of(samples)
    table = MediaTable()
    if any(map(_media, samples)):
        is_known = all(isinstance(x, Sample) and x.config is not None for x in samples)
        table = media_of_row(family, row, samples[0].config) if family is not None and is_known else None
    if table is not None and any(IMAGE_TOKENS_KEY in sample for sample in samples):
        tokens = [int(n) for sample in samples for n in sample.get(IMAGE_TOKENS_KEY, ())]
        table = _whole_images(table, tokens, row.segments)
    columns = () if family is None else family.token_columns
    known = row.known_metadata
    return replace(
        known,
        offsets=known.offsets if any(known.offsets) else (),
        media=table,
        prefixes=tuple(prefix_length(sample[name].numpy()) for name in columns for sample in samples),
        num_targets=sum(map(num_targets, samples)),
    )


def _whole_images(tiles: MediaTable, tokens: Sequence[int], segments: Segments) -> MediaTable:
    """Replace tiles in a media table with the images that they belong to; `tokens`: placeholders of each image."""
    spans = tiles_of_images([tile.tokens for tile in tiles.images], tokens)
    images = [
        Expected(
            medium=replace(
                tiles.images[start], sizes=tuple(row for tile in tiles.images[start:stop] for row in tile.sizes)
            ),
            tokens=(count,),
        )
        for (start, stop), count in zip(spans, tokens, strict=True)
    ]
    is_image = np.where(tiles.types(segments) == IMAGE, IMAGE, TEXT)
    return MediaTable(media=(*place(images, is_image, segments, counted=[IMAGE]).media, *tiles.videos, *tiles.audios))


def num_targets(sample: Sample) -> int:
    """Count the labeled next-token targets of a sample."""
    return int((sample["labels"][1:] != IGNORE).sum())


def grids_of(sample: Sample, modality: Literal["image", "video"]) -> tuple[Grid, ...]:
    """Return a sample's image or video grids as tuples of integers."""
    name = f"{modality}_grid_thw"
    return tuple((t, h, w) for t, h, w in sample[name].tolist()) if name in sample else ()


def kind_of(sample: Sample) -> str:
    """Describe the media of a sample: "text", "image", "2 images", "video", "image and video"."""
    counts = {modality: len(grids_of(sample, modality)) for modality in ("image", "video")}
    counts["image"] += len(sample.get(IMAGE_TOKENS_KEY, ()))
    counts["audio"] = len(sample.get("feature_attention_mask", ()))
    return " and ".join(name if n == 1 else f"{n} {name}s" for name, n in counts.items() if n) or "text"


def _video(config: Any, family: Family, grid: Grid) -> list[int]:
    """Return the tokens of a video.

    If the family writes frames apart, each frame has a time stamp of two words: before it in Qwen3-VL, after it in
    GLM-4V.
    """
    runs, stamp = family.video_runs([grid], config), list(word_ids(config)[:2])
    if family.videos_as_images:
        frames = [token for n in runs for token in (*_written(config, config.image_token_id, [n]), *stamp)]
        return [config.video_start_token_id, *frames, config.video_end_token_id]
    apart = len(family.video_runs([(2, *grid[1:])], config)) > 1
    start, end = config.vision_start_token_id, config.vision_end_token_id
    if family.expert_types is not None:  # the start and end tokens of a video choose experts, too
        start, end = config.video_start_token_id, config.video_end_token_id
    before = [*stamp, start] if apart else [start]
    return [token for n in runs for token in (*before, *[config.video_token_id] * n, end)]


def frames_of(config: Any) -> tuple[int, int]:
    """Return the smallest and largest number of frames of a synthetic audio: more than a chunk, so that no tower reads
    padding."""
    window = config.audio_config.n_window
    return 2 * window + 1, 5 * window


def _audio(config: Any, family: Family, frames: int) -> list[int]:
    assert family.audio is not None
    count = family.audio.tokens(frames, config.audio_config)
    return [config.audio_start_token_id, *[config.audio_token_id] * count, config.audio_end_token_id]


# ---------------------------------------------------------------------- images and videos without grids

APART = ("smolvlm", "idefics3", "lfm2_vl", "cohere2_vision", "aya_vision", "llama4", "gemma3")
"""Families that write the tokens of each tile of an image between start and end tokens; others join those of all."""


def _image_of_tiles(config: Any, family: Family, grid: Grid, draw: Draw, *, several: bool) -> tuple[list[int], Tensors]:
    """Return the token ids and tensors of an image; `several`: its sample has several images."""
    make, rule = family.image, family.tile_tokens
    assert make is not None
    assert rule is not None
    if several and any(join.counts_images for join in family.media.values()):  # an image is written differently then
        tensors = thumbnail_and_tiles(config, grid, draw, thumbnail=True)
        two = {"image_sizes": tensors["image_sizes"].repeat(2, 1), "batch_num_images": torch.tensor([2])}
        return _written(config, config.image_token_id, rule(two, config)[:1]), tensors
    tensors = make(config, grid, draw)
    runs = rule(tensors, config)
    return _written(config, config.image_token_id, runs if family.model_type in APART else [sum(runs)]), tensors


def _video_of_tiles(config: Any, family: Family, grid: Grid, draw: Draw) -> tuple[list[int], Tensors]:
    """Return the token ids and tensors of a video."""
    make, rule = family.video, family.video_tokens
    assert make is not None
    assert rule is not None
    tensors = make(config, grid, draw)
    runs, frames = rule(tensors, config), int(tensors.get("num_frames_per_video", 1))
    return _written(config, config.video_token_id, [n // frames for n in runs for _ in range(frames)]), tensors


def _written(config: Any, placeholder: int, runs: Sequence[int]) -> list[int]:
    """Return runs of placeholders, each between start and end token."""
    names = ("vision_start_token_id", "vision_end_token_id"), ("boi_token_id", "eoi_token_id")
    names = next((pair for pair in names if hasattr(config, pair[0])), ("boi_token_index", "eoi_token_index"))
    start, end = (getattr(config, name, word_ids(config)[0]) for name in names)
    return [token for run in runs for token in (start, *[placeholder] * run, end)]
