"""Tiny processors of families beyond Qwen: the shipped classes around a small vocabulary, without a hub.

Images become tiles of 4 x 4 patches of 7 x 7 pixels, or patches of 14 x 14 pixels with a grid: as the tiny models take
them that are configured by these processors (`tiny_model(processor=...)`). They go through Pillow, but for those of
families whose image processors are in transformers for torchvision only.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from importlib import import_module
from typing import Any, final

from vlmpack.errors import FamilyError
from vlmpack.testing.family_templates import (
    AYA_TEMPLATE,
    CHATML_TEMPLATE,
    ERNIE_TEMPLATE,
    GEMMA_TEMPLATE,
    GLM_TEMPLATE,
    IDEFICS_TEMPLATE,
    INTERNVL_TEMPLATE,
    KIMI_TEMPLATE,
    LLAMA4_TEMPLATE,
    LLAVA_TEMPLATE,
    MISTRAL_TEMPLATE,
    ONEVISION_TEMPLATE,
    PADDLE_TEMPLATE,
    with_tokens,
)

PATCH = 7
"""Side of a patch in pixels."""
TILE = 4 * PATCH
"""Side of a tile in pixels."""
POOLED, WHOLE = 4, 16
"""Placeholder tokens of a tile: one of two by two patches, or one of each."""
_SIZE = {"height": TILE, "width": TILE}
_PINPOINTS = [[rows * TILE, columns * TILE] for rows, columns in ((1, 2), (2, 1), (2, 2), (1, 3), (3, 1))]
_GRIDS = {"patch_size": 14, "merge_size": 2, "size": {"shortest_edge": 4 * TILE**2, "longest_edge": 64 * TILE**2}}
_ENDS = {"eos_token": "<eos>", "pad_token": "<pad>", "bos_token": "<bos>"}
_TORCHVISION = ("torchvision",)
_CHATML_ENDS = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}


@final
@dataclass(frozen=True, kw_only=True)
class ProcessorRecipe:
    """The parts of one family's processor."""

    processor: str
    """Name of its transformers class."""
    image_processor: str
    """Module under `transformers.models` and name of the class of its image processor: Pillow's, where there is one."""
    images: Mapping[str, Any] = field(default_factory=lambda: {"size": _SIZE})
    """Settings of the image processor."""
    special: Sequence[str] = ()
    """Special tokens of the template and of images."""
    named: Mapping[str, str] = field(default_factory=dict)
    """Special tokens that the tokenizer has under a name of their own, such as `boi_token`."""
    ends: Mapping[str, str] = field(default_factory=lambda: _CHATML_ENDS)
    """Tokens that begin, end and fill up a text."""
    sentences: bool = False
    """True: words are tokens with their blanks, as of SentencePiece; False: bytes are, as of Qwen."""
    template: str | None = None
    """The chat template; None: there is none."""
    patch_size: int = PATCH
    """Side of a patch in pixels."""
    placeholder: str | None = None
    """The token that is repeated for an image; None: the one that stands for the whole image before."""
    video_processor: str | None = None
    """The same of its video processor, whose settings the processor reads even for images; None: it does not."""
    packages: Sequence[str] = ()
    """Packages that must be installed, as transformers has no such class without."""
    absent: Sequence[str] = ()
    """Parts of the processor for videos and audio, which are left out."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Further settings of the processor."""


_MARKERS = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
_GLM = ProcessorRecipe(
    processor="Glm4vProcessor",
    image_processor="glm4v.image_processing_pil_glm4v.Glm4vImageProcessorPil",
    images={**_GRIDS, "temporal_patch_size": 2},
    special=(
        *("[gMASK]", "<sop>", "<|user|>", "<|assistant|>", "<|system|>", "<|image|>", "<|video|>"),
        *("<|begin_of_image|>", "<|end_of_image|>", "<|begin_of_video|>", "<|end_of_video|>"),
    ),
    ends={"eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"},
    patch_size=14,
    template=GLM_TEMPLATE,
    absent=("video_processor",),
)
_GEMMA4 = ProcessorRecipe(
    processor="Gemma4Processor",
    image_processor="gemma4.image_processing_pil_gemma4.Gemma4ImageProcessorPil",
    images={"patch_size": 4, "pooling_kernel_size": 2, "max_soft_tokens": 70},
    patch_size=4,
    special=("<|turn>", "<turn|>"),
    named={
        "boi_token": "<|image>",
        "eoi_token": "<image|>",
        "image_token": "<|image|>",
        "audio_token": "<|audio|>",
        "boa_token": "<|audio>",
        "eoa_token": "<audio|>",
    },
    ends=_ENDS,
    sentences=True,
    template=with_tokens(GEMMA_TEMPLATE, TURN_START="<|turn>", TURN_END="<turn|>", IMAGE="<|image|>"),
    absent=("feature_extractor", "video_processor"),
)
RECIPES: Mapping[str, ProcessorRecipe] = {
    "gemma3": ProcessorRecipe(
        processor="Gemma3Processor",
        image_processor="gemma3.image_processing_pil_gemma3.Gemma3ImageProcessorPil",
        special=("<start_of_turn>", "<end_of_turn>"),
        named={
            "boi_token": "<start_of_image>",
            "eoi_token": "<end_of_image>",
            "image_token": "<image_soft_token>",
        },
        ends=_ENDS,
        sentences=True,
        template=with_tokens(
            GEMMA_TEMPLATE, TURN_START="<start_of_turn>", TURN_END="<end_of_turn>", IMAGE="<start_of_image>"
        ),
        images={"size": {"height": 6 * PATCH, "width": 6 * PATCH}},
        settings={"image_seq_length": 9},
    ),
    "gemma4": _GEMMA4,
    "internvl": ProcessorRecipe(
        processor="InternVLProcessor",
        image_processor="got_ocr2.image_processing_pil_got_ocr2.GotOcr2ImageProcessorPil",
        images={"size": _SIZE, "min_patches": 1, "max_patches": 6},
        special=("<|im_start|>", "<|im_end|>"),
        named={
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        },
        template=INTERNVL_TEMPLATE,
        absent=("video_processor",),
        settings={"image_seq_length": POOLED},
    ),
    "idefics3": ProcessorRecipe(
        processor="Idefics3Processor",
        image_processor="idefics3.image_processing_pil_idefics3.Idefics3ImageProcessorPil",
        images={"size": {"longest_edge": 3 * TILE}, "max_image_size": {"longest_edge": TILE}},
        special=(
            *("<|im_start|>", "<end_of_utterance>", "<fake_token_around_image>", "<image>", "<global-img>"),
            *_MARKERS,
        ),
        ends={"eos_token": "<end_of_utterance>", "pad_token": "<|im_end|>", "bos_token": "<|im_start|>"},
        template=IDEFICS_TEMPLATE,
        settings={"image_seq_len": POOLED},
    ),
    "llava": ProcessorRecipe(
        processor="LlavaProcessor",
        image_processor="clip.image_processing_pil_clip.CLIPImageProcessorPil",
        images={"size": {"shortest_edge": TILE}, "crop_size": _SIZE},
        special=("<image>",),
        ends=_ENDS,
        sentences=True,
        template=LLAVA_TEMPLATE,
        settings={"patch_size": PATCH, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
    ),
    "llava_next": ProcessorRecipe(
        processor="LlavaNextProcessor",
        image_processor="llava_next.image_processing_pil_llava_next.LlavaNextImageProcessorPil",
        images={"size": {"shortest_edge": TILE}, "crop_size": _SIZE, "image_grid_pinpoints": _PINPOINTS},
        special=("<image>",),
        ends=_ENDS,
        sentences=True,
        template=LLAVA_TEMPLATE,
        settings={"patch_size": PATCH, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
    ),
    "llava_onevision": ProcessorRecipe(
        processor="LlavaOnevisionProcessor",
        image_processor="llava_onevision.image_processing_pil_llava_onevision.LlavaOnevisionImageProcessorPil",
        images={"size": _SIZE, "image_grid_pinpoints": _PINPOINTS},
        special=("<|im_start|>", "<|im_end|>", "<image>", "<video>"),
        template=ONEVISION_TEMPLATE,
        absent=("video_processor",),
        settings={"num_image_tokens": WHOLE, "vision_feature_select_strategy": "full"},
    ),
    "glm4v": _GLM,
    "glm4v_moe": _GLM,
    "glm46v": replace(
        _GLM,
        processor="Glm46VProcessor",
        image_processor="glm46v.image_processing_pil_glm46v.Glm46VImageProcessorPil",
    ),
    "paddleocr_vl": ProcessorRecipe(
        processor="PaddleOCRVLProcessor",
        image_processor="paddleocr_vl.image_processing_pil_paddleocr_vl.PaddleOCRVLImageProcessorPil",
        images={**_GRIDS, "temporal_patch_size": 1},
        special=("<|IMAGE_START|>", "<|IMAGE_END|>"),
        named={"image_token": "<|IMAGE_PLACEHOLDER|>"},
        ends=_ENDS,
        sentences=True,
        patch_size=14,
        template=PADDLE_TEMPLATE,
    ),
    "aya_vision": ProcessorRecipe(
        processor="AyaVisionProcessor",
        image_processor="got_ocr2.image_processing_pil_got_ocr2.GotOcr2ImageProcessorPil",
        images={"size": _SIZE, "min_patches": 1, "max_patches": 6},
        special=(
            *("<image>", "<|START_OF_IMG|>", "<|END_OF_IMG|>", "<|IMG_PATCH|>", "TILE", "TILE_GLOBAL"),
            *("<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>"),
            *("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
        ),
        ends=_ENDS,
        template=AYA_TEMPLATE,
        settings={"patch_size": PATCH, "downsample_factor": 2, "img_size": TILE},
    ),
    "cohere2_vision": ProcessorRecipe(  # its processor counts the side of a tile in tokens as patches of its own
        processor="Cohere2VisionProcessor",
        image_processor="cohere2_vision.image_processing_cohere2_vision.Cohere2VisionImageProcessor",
        images={"size": _SIZE, "max_patches": 6, "patch_size": 2},
        special=(
            *("<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>"),
            *("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
        ),
        named={
            "image_token": "<|IMG_PATCH|>",
            "boi_token": "<|START_OF_IMG|>",
            "eoi_token": "<|END_OF_IMG|>",
            "img_line_break_token": "<|IMG_LINE_BREAK|>",
        },
        ends=_ENDS,
        template=AYA_TEMPLATE.replace("<image>", "<|IMG_PATCH|>"),
        packages=_TORCHVISION,
    ),
    "llama4": ProcessorRecipe(
        processor="Llama4Processor",
        image_processor="llama4.image_processing_llama4.Llama4ImageProcessor",
        images={"size": _SIZE, "max_patches": 4},
        special=(
            *("<|header_start|>", "<|header_end|>", "<|eot|>", "<|image_start|>", "<|image_end|>", "<|image|>"),
            *("<|patch|>", "<|tile_x_separator|>", "<|tile_y_separator|>"),
        ),
        ends={"eos_token": "<|eot|>", "pad_token": "<pad>", "bos_token": "<bos>"},
        placeholder="<|patch|>",
        template=LLAMA4_TEMPLATE,
        settings={"patch_size": PATCH},
        packages=_TORCHVISION,
    ),
    "gemma4_unified": replace(
        _GEMMA4,
        processor="Gemma4UnifiedProcessor",
        image_processor="gemma4_unified.image_processing_gemma4_unified.Gemma4UnifiedImageProcessor",
        packages=_TORCHVISION,
    ),
    "kimi_k25": ProcessorRecipe(
        processor="Kimi_K25Processor",
        image_processor="kimi_k25.image_processing_kimi_k25.Kimi_K25ImageProcessor",
        images={"patch_size": PATCH, "max_patches": 64, "size": {"max_height": 12, "max_width": 12}},
        special=(
            *("<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>", "<|im_end|>"),
            *("<|media_begin|>", "<|media_content|>", "<|media_pad|>", "<|media_end|>"),
            "<|kimi_k25_video_placeholder|>",
        ),
        template=KIMI_TEMPLATE,
        absent=("video_processor",),
        packages=_TORCHVISION,
    ),
    "lfm2_vl": ProcessorRecipe(
        processor="Lfm2VlProcessor",
        image_processor="lfm2_vl.image_processing_lfm2_vl.Lfm2VlImageProcessor",
        images={
            "encoder_patch_size": PATCH,
            "tile_size": TILE,
            "min_image_tokens": 1,
            "max_image_tokens": POOLED,
            "max_tiles": 4,
        },
        special=(
            *("<|im_start|>", "<|im_end|>", "<image>", "<|image_start|>", "<|image_end|>", "<|img_thumbnail|>"),
            *(f"<|img_row_{row}_col_{column}|>" for row in range(1, 5) for column in range(1, 5)),
        ),
        ends=_CHATML_ENDS | {"bos_token": "<|startoftext|>"},
        template=with_tokens(CHATML_TEMPLATE, IMAGE="<image>").replace("BEGINNING", "bos_token"),
        packages=_TORCHVISION,
    ),
    "mistral3": ProcessorRecipe(
        processor="PixtralProcessor",
        image_processor="pixtral.image_processing_pil_pixtral.PixtralImageProcessorPil",
        images={"size": {"longest_edge": 3 * TILE}, "patch_size": PATCH},
        special=(
            *("[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
            *("[IMG]", "[IMG_BREAK]", "[IMG_END]"),
        ),
        ends={"eos_token": "</s>", "pad_token": "<pad>", "bos_token": "<s>"},
        template=MISTRAL_TEMPLATE,
        settings={"patch_size": PATCH, "spatial_merge_size": 2},
        packages=_TORCHVISION,
    ),
    "minicpmv4_6": ProcessorRecipe(
        processor="MiniCPMV4_6Processor",
        image_processor="minicpmv4_6.image_processing_pil_minicpmv4_6.MiniCPMV4_6ImageProcessorPil",
        images={"patch_size": PATCH, "scale_resolution": 2 * TILE, "max_slice_nums": 4},
        video_processor="minicpmv4_6.video_processing_minicpmv4_6.MiniCPMV4_6VideoProcessor",
        special=("<|im_start|>", "<|im_end|>"),
        named={
            "image_token": "<|image_pad|>",
            "video_token": "<|video_pad|>",
            **{
                f"{kind}_{name}_token": token.format(kind)
                for kind in ("image", "slice", "image_id")
                for name, token in (("start", "<{}>"), ("end", "</{}>"))
            },
        },
        template=with_tokens(CHATML_TEMPLATE, BEGINNING="", IMAGE="<|image_pad|>"),
        packages=_TORCHVISION,
    ),
    "smolvlm": ProcessorRecipe(
        processor="SmolVLMProcessor",
        image_processor="smolvlm.image_processing_pil_smolvlm.SmolVLMImageProcessorPil",
        images={"size": {"longest_edge": 3 * TILE}, "max_image_size": {"longest_edge": TILE}},
        video_processor="smolvlm.video_processing_smolvlm.SmolVLMVideoProcessor",
        special=(
            *("<|im_start|>", "<end_of_utterance>", "<fake_token_around_image>", "<image>", "<global-img>", "<video>"),
            *_MARKERS,
        ),
        ends={"eos_token": "<end_of_utterance>", "pad_token": "<|im_end|>", "bos_token": "<|im_start|>"},
        template=IDEFICS_TEMPLATE,
        settings={"image_seq_len": POOLED},
        packages=(*_TORCHVISION, "num2words"),
    ),
    "ernie4_5_vl_moe": ProcessorRecipe(
        processor="Ernie4_5_VLMoeProcessor",
        image_processor="ernie4_5_vl_moe.image_processing_pil_ernie4_5_vl_moe.Ernie4_5_VLMoeImageProcessorPil",
        images=_GRIDS,
        named={
            f"{kind.lower()}_{name}token": f"<|{kind}_{token}|>"
            for kind in ("IMAGE", "VIDEO")
            for name, token in (("", "PLACEHOLDER"), ("start_", "START"), ("end_", "END"))
        },
        ends=_ENDS,
        sentences=True,
        patch_size=14,
        template=ERNIE_TEMPLATE,
        absent=("video_processor",),
    ),
    "deepseek_ocr2": ProcessorRecipe(  # counts queries of patches of 2 pixels: 144 a view, as the tiny model has
        processor="DeepseekOcr2Processor",
        image_processor="deepseek_ocr2.image_processing_pil_deepseek_ocr2.DeepseekOcr2ImageProcessorPil",
        images={"size": {"height": 96, "width": 96}, "tile_size": 96},
        special=("<image>",),
        ends=_ENDS,
        patch_size=12,
        settings={"patch_size": 2, "downsample_ratio": 4},
    ),
    "paligemma": ProcessorRecipe(
        processor="PaliGemmaProcessor",
        image_processor="siglip.image_processing_pil_siglip.SiglipImageProcessorPil",
        special=("<image>",),
        ends=_ENDS,
        sentences=True,
    ),
}
"""By `config.model_type`."""


def build_processor(family: str, vocab_size: int, trained: Callable[[int], str]) -> Any:
    """Build the processor of a recipe.

    Args:
        family: a key of `RECIPES`.
        vocab_size: entries of the vocabulary of bytes.
        trained: returns that vocabulary and its merges as JSON, for a number of entries.

    Raises:
        FamilyError: a package is not installed without which transformers has no such class.
    """
    from transformers.models.auto.processing_auto import processor_class_from_name

    from vlmpack.data.processor import without_parts

    if missing := missing_packages(family):
        raise FamilyError(f"the processor of {family} needs {' and '.join(missing)}; install it")
    recipe = RECIPES[family]
    image_processor = _class_of(recipe.image_processor)(**recipe.images)
    videos = {} if recipe.video_processor is None else {"video_processor": _class_of(recipe.video_processor)()}
    if family == "paligemma":
        image_processor.image_seq_length = WHOLE
    tokenizer = _sentence_tokenizer(recipe) if recipe.sentences else _byte_tokenizer(recipe, trained(vocab_size))
    return without_parts(
        processor_class_from_name(recipe.processor),
        absent=recipe.absent,
        image_processor=image_processor,
        tokenizer=tokenizer,
        chat_template=recipe.template,
        **videos,
        **recipe.settings,
    )


@cache
def missing_packages(family: str) -> tuple[str, ...]:
    """Name the packages of a recipe that cannot be imported: torchvision may be there, of another torch."""
    missing = []
    for package in RECIPES[family].packages:
        try:
            import_module(package)
        except (ImportError, RuntimeError):
            missing.append(package)
    return tuple(missing)


def _class_of(path: str) -> Any:
    module, name = path.rsplit(".", 1)
    return vars(import_module(f"transformers.models.{module}"))[name]


def tile_sizes(processor: Any) -> dict[str, Any] | None:
    """Read token ids and sizes of a tiny model off one of these processors; None: it is another one."""
    recipe = next((recipe for recipe in RECIPES.values() if recipe.processor == type(processor).__name__), None)
    if recipe is None:
        return None
    tokenizer, (placeholder, *_) = processor.tokenizer, processor.image_token_ids
    if recipe.placeholder is not None:
        placeholder = tokenizer.convert_tokens_to_ids(recipe.placeholder)
    ids = {
        "image_token_id": placeholder,
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    if (of_videos := vars(processor).get("video_token_id")) is not None:
        ids["video_token_id"] = of_videos
    if "image_start_token" in recipe.named:
        ids |= {"vision_start_token_id": tokenizer.image_start_token_id, "video_token_id": processor.video_token_id}
        ids["vision_end_token_id"] = tokenizer.image_end_token_id
    return {**ids, "vocab_size": len(tokenizer), "patch_size": recipe.patch_size}


def _byte_tokenizer(recipe: ProcessorRecipe, vocabulary: str) -> Any:
    from transformers import Qwen2Tokenizer

    vocab, merges = json.loads(vocabulary)
    pairs: Any = [tuple(merge) for merge in merges]
    tokenizer = Qwen2Tokenizer(vocab=vocab, merges=pairs, extra_special_tokens=dict(recipe.named), **recipe.ends)
    tokenizer.add_tokens(list(recipe.special), special_tokens=True)
    return tokenizer


def _sentence_tokenizer(recipe: ProcessorRecipe) -> Any:
    from transformers import GemmaTokenizer

    vocab, merges = json.loads(_sentence_vocabulary())
    pairs: Any = [tuple(merge) for merge in merges]
    tokenizer = GemmaTokenizer(
        vocab=vocab, merges=pairs, extra_special_tokens=dict(recipe.named), add_bos_token=True, **recipe.ends
    )
    tokenizer.add_tokens(list(recipe.special), special_tokens=True)
    return tokenizer


@lru_cache(maxsize=1)
def _sentence_vocabulary() -> str:
    """Vocabulary and merges as JSON, after the special tokens and the 256 bytes."""
    from tokenizers import Tokenizer, models, normalizers, trainers

    from vlmpack.testing.processors import corpus

    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", *(f"<0x{byte:02X}>" for byte in range(256))]
    bpe = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    bpe.normalizer = normalizers.Replace(" ", "▁")  # pyright: ignore[reportAttributeAccessIssue]
    bpe.train_from_iterator(corpus(), trainers.BpeTrainer(vocab_size=800, special_tokens=special, show_progress=False))
    model = json.loads(bpe.to_str())["model"]
    return json.dumps([model["vocab"], model["merges"]])
