"""Tiny processors of families beyond Qwen: the shipped classes around a small vocabulary, without a hub or torchvision.

Images become tiles of 4 x 4 patches of 7 x 7 pixels, or patches of 14 x 14 pixels with a grid: as the tiny models take
them that are configured by these processors (`tiny_model(processor=...)`). Chat templates are those of the families'
instruction-tuned checkpoints, without tools: some mark their answers (`{% generation %}`), some take nothing but lists
of parts, some change the names of roles.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from importlib import import_module
from typing import Any, final

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
_CHATML_ENDS = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}

GEMMA_TEMPLATE = (
    "{{ bos_token }}{%- if messages[0]['role'] == 'system' -%}"
    "{%- if messages[0]['content'] is string -%}{%- set first_user_prefix = messages[0]['content'] + '\n\n' -%}"
    "{%- else -%}{%- set first_user_prefix = messages[0]['content'][0]['text'] + '\n\n' -%}{%- endif -%}"
    "{%- set loop_messages = messages[1:] -%}"
    "{%- else -%}{%- set first_user_prefix = '' -%}{%- set loop_messages = messages -%}{%- endif -%}"
    "{%- for message in loop_messages -%}"
    "{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{%- endif -%}"
    "{%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}"
    "{{ TURN_START + role + '\n' + (first_user_prefix if loop.first else '') }}"
    "{%- if message['content'] is string -%}{{ message['content'] | trim }}"
    "{%- else -%}{%- for item in message['content'] -%}"
    "{%- if item['type'] == 'image' -%}{{ IMAGE }}"
    "{%- elif item['type'] == 'text' -%}{{ item['text'] | trim }}{%- endif -%}{%- endfor -%}{%- endif -%}"
    "{{ TURN_END + '\n' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ TURN_START + 'model\n' }}{%- endif -%}"
)
"""Gemma's, the names of its tokens left open: roles alternate, and a system's text joins the user's."""

INTERNVL_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for content in message['content'] %}"
    "{% if content['type'] == 'image' %}{{ '<IMG_CONTEXT>\n' }}"
    "{% elif content['type'] == 'text' %}{{ content['text'] }}{% endif %}{% endfor %}{% endif %}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

IDEFICS_TEMPLATE = (
    "<|im_start|>{% for message in messages %}{{ message['role'] | capitalize }}"
    "{% if message['content'][0]['type'] == 'image' %}{{ ':' }}{% else %}{{ ': ' }}{% endif %}"
    "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{ line['text'] }}"
    "{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>\n{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)

LLAVA_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] != 'system' %}{{ message['role'].upper() + ': ' }}{% endif %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>\n' }}{% endfor %}"
    "{% if message['role'] != 'assistant' %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}{{ content['text'] + ' ' }}"
    "{% endfor %}{% else %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}"
    "{% generation %}{{ content['text'] + ' ' }}{% endgeneration %}{% endfor %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)

ONEVISION_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + ' ' }}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>' }}{% endfor %}"
    "{% if message['role'] != 'assistant' %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}{{ '\n' + content['text'] }}"
    "{% endfor %}{% else %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}"
    "{% generation %}{{ '\n' + content['text'] }}{% endgeneration %}{% endfor %}{% endif %}{{ '<|im_end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

GLM_TEMPLATE = (
    "[gMASK]<sop>{% for message in messages %}{{ '<|' + message['role'] + '|>\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<|begin_of_image|><|image|><|end_of_image|>' }}"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)

PADDLE_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'user' %}{{ 'User: ' }}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>' }}"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{{ '\n' }}"
    "{% else %}{{ 'Assistant:\n' }}{% for part in message['content'] %}{{ part['text'] }}{% endfor %}{{ eos_token }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:\n' }}{% endif %}"
)

ERNIE_TEMPLATE = (
    "{{ bos_token }}{% set images = namespace(count=0) %}{% for message in messages %}"
    "{% if message['role'] == 'user' %}{{ 'User: ' }}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{% set images.count = images.count + 1 %}"
    "{{ 'Picture ' ~ images.count ~ ':<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>' }}"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{{ '\n' }}"
    "{% else %}{{ 'Assistant: ' }}{% for part in message['content'] %}{{ part['text'] }}{% endfor %}{{ eos_token }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ 'Assistant: ' }}{% endif %}"
)

AYA_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'user' %}{{ '<|START_OF_TURN_TOKEN|><|USER_TOKEN|>' }}"
    "{% else %}{{ '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|><|START_RESPONSE|>' }}{% endif %}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<image>' }}{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
    "{% if message['role'] != 'user' %}{{ '<|END_RESPONSE|>' }}{% endif %}{{ '<|END_OF_TURN_TOKEN|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|><|START_RESPONSE|>' }}{% endif %}"
)


@final
@dataclass(frozen=True, kw_only=True)
class ProcessorRecipe:
    """The parts of one family's processor."""

    processor: str
    """Name of its transformers class."""
    image_processor: str
    """Module under `transformers.models` and name of the class of its Pillow image processor."""
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
    absent: Sequence[str] = ()
    """Parts of the processor for videos and audio, which are left out."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Further settings of the processor."""


def _tokens(template: str, **tokens: str) -> str:
    for name, token in tokens.items():
        template = template.replace(name, f"'{token}'")
    return template


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
        template=_tokens(
            GEMMA_TEMPLATE, TURN_START="<start_of_turn>", TURN_END="<end_of_turn>", IMAGE="<start_of_image>"
        ),
        images={"size": {"height": 6 * PATCH, "width": 6 * PATCH}},
        settings={"image_seq_length": 9},
    ),
    "gemma4": ProcessorRecipe(
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
        template=_tokens(GEMMA_TEMPLATE, TURN_START="<|turn>", TURN_END="<turn|>", IMAGE="<|image|>"),
        absent=("feature_extractor", "video_processor"),
    ),
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
    """
    from transformers.models.auto.processing_auto import processor_class_from_name

    from vlmpack.data import without_parts

    recipe = RECIPES[family]
    module, name = recipe.image_processor.rsplit(".", 1)
    image_processor = vars(import_module(f"transformers.models.{module}"))[name](**recipe.images)
    if family == "paligemma":
        image_processor.image_seq_length = WHOLE
    tokenizer = _sentence_tokenizer(recipe) if recipe.sentences else _byte_tokenizer(recipe, trained(vocab_size))
    return without_parts(
        processor_class_from_name(recipe.processor),
        absent=recipe.absent,
        image_processor=image_processor,
        tokenizer=tokenizer,
        chat_template=recipe.template,
        **recipe.settings,
    )


def tile_sizes(processor: Any) -> dict[str, Any] | None:
    """Read token ids and sizes of a tiny model off one of these processors; None: it is another one."""
    recipe = next((recipe for recipe in RECIPES.values() if recipe.processor == type(processor).__name__), None)
    if recipe is None:
        return None
    tokenizer, (placeholder, *_) = processor.tokenizer, processor.image_token_ids
    ids = {
        "image_token_id": placeholder,
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    if (of_videos := vars(processor).get("video_token_id")) is not None:
        ids["video_token_id"] = of_videos
    if "image_start_token" in recipe.named:
        ids |= {"vision_start_token_id": processor.image_start_token_id, "video_token_id": processor.video_token_id}
        ids["vision_end_token_id"] = processor.image_end_token_id
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
