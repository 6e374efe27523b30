"""Tiny processors: real Qwen processors, built in a second without the hub, a download or torchvision.

Every part is the class that transformers ships: `Qwen2VLProcessor`, `Qwen2_5_VLProcessor`, `Qwen3VLProcessor` (also for
Qwen3.5 and Qwen4-exp) or a Qwen-Omni processor, around a `Qwen2Tokenizer` or `Qwen3_5Tokenizer` and a
`Qwen2VLImageProcessorPil`. Only the vocabulary is small: a byte-level BPE trained on made-up receipts. It can tokenize
any text, and the words of receipts become single tokens.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

from vlmpack.data.processor import without_parts
from vlmpack.errors import ConfigError
from vlmpack.families.registry import FAMILIES
from vlmpack.testing.models import DEFAULT_FAMILY, MEL_BINS, patch_size_of


def _split(words: str) -> tuple[str, ...]:
    return tuple(words.split())


def _chat_template(written: Mapping[str, str]) -> str:
    """Return a ChatML template; message content is a string or a list of parts.

    `written`: kind of medium → its placeholder between its start and end tokens, as the released models write it.
    """
    media = "".join(f"{{%- elif part['type'] == '{kind}' -%}}{{{{- '{text}' -}}}}" for kind, text in written.items())
    return (
        "{%- for message in messages -%}{{- '<|im_start|>' + message['role'] + '\\n' -}}"
        "{%- if message['content'] is string -%}{{- message['content'] -}}"
        "{%- else -%}{%- for part in message['content'] -%}"
        "{%- if part['type'] == 'text' -%}{{- part['text'] -}}" + media + "{%- endif -%}"
        "{%- endfor -%}{%- endif -%}{{- '<|im_end|>\\n' -}}{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
    )


CHAT_TEMPLATE = _chat_template({k: f"<|vision_start|><|{k}_pad|><|vision_end|>" for k in ("image", "video")})
"""ChatML template with image and video placeholders."""

SPECIAL_TOKENS = _split(
    "<|endoftext|> <|im_start|> <|im_end|> <|object_ref_start|> <|object_ref_end|> <|box_start|> <|box_end|> "
    "<|quad_start|> <|quad_end|> <|vision_start|> <|vision_end|> <|vision_pad|> <|image_pad|> <|video_pad|>"
)
"""Qwen's special tokens, in Qwen's order."""

MERGE_SIZE = 2
QWEN3_5_TOKENIZER = ("qwen3_5", "qwen3_5_moe", "qwen4_exp")
"""Families with a `Qwen3_5Tokenizer`; the others have a `Qwen2Tokenizer`."""


def tiny_processor(
    family: str = DEFAULT_FAMILY,
    *,
    min_pixels: int | None = None,
    max_pixels: int | None = None,
    vocab_size: int = 800,
    chat_template: str | None = None,
) -> Any:
    """Build a real processor offline.

    The processor is the same with and without torchvision: images go through PIL, and there is no video processor
    (`vlmpack.collate` prepares videos itself). Its `save_pretrained` calls `save_processor`.

    Args:
        family: a Qwen family, such as "qwen2_5_vl", "qwen3_vl", "qwen3_5" or "qwen3_omni_moe_thinker".
        min_pixels: smallest area of a resized image, in pixels; None: the area of 4 image tokens. Qwen only.
        max_pixels: largest area of a resized image, in pixels; None: the area of 256 image tokens. Qwen only.
        vocab_size: entries of the trained vocabulary, without special tokens; at least 256, one for each byte.
        chat_template: Jinja template of conversations; None: the family's.

    Raises:
        ConfigError: the family is unknown, or the vocabulary is too small for all bytes.
    """
    if family not in (names := processor_families()):
        raise ConfigError(f"no processor for family {family!r}; use one of {', '.join(names)}")
    if vocab_size < 256:
        raise ConfigError(f"vocab_size={vocab_size} has no room for the 256 bytes; use at least 256")
    from transformers import WhisperFeatureExtractor
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
    from transformers.utils.constants import OPENAI_CLIP_MEAN, OPENAI_CLIP_STD

    patch_size, has_audio = patch_size_of(family), family in OMNI_TOKENS
    of_qwen3 = FAMILIES[family].processor == "Qwen3VLProcessor"
    token_area = (patch_size * MERGE_SIZE) ** 2
    image_processor = Qwen2VLImageProcessorPil(
        patch_size=patch_size,
        merge_size=MERGE_SIZE,
        temporal_patch_size=2,
        min_pixels=4 * token_area if min_pixels is None else min_pixels,
        max_pixels=256 * token_area if max_pixels is None else max_pixels,
        image_mean=[0.5] * 3 if of_qwen3 else OPENAI_CLIP_MEAN,
        image_std=[0.5] * 3 if of_qwen3 else OPENAI_CLIP_STD,
    )
    template = _omni_template(family) if has_audio else CHAT_TEMPLATE
    audio = {"feature_size": MEL_BINS, "chunk_length": 8, "return_attention_mask": True}  # of 8 s at most
    return without_parts(
        FAMILIES[family].processor_class,
        absent=("video_processor",),
        image_processor=image_processor,
        tokenizer=_tokenizer(family, vocab_size),
        chat_template=template if chat_template is None else chat_template,
        **({"feature_extractor": WhisperFeatureExtractor(**audio)} if has_audio else {}),
    )


def processor_families() -> list[str]:
    """List the families that have a tiny processor: Qwen's."""
    return [name for name, family in FAMILIES.items() if family.has_vision and family.processor.startswith("Qwen")]


def _tokenizer(family: str, vocab_size: int) -> Any:
    """Build a new tokenizer (users add tokens to theirs) from a vocabulary that is trained once per process."""
    from transformers import Qwen2Tokenizer, Qwen3_5Tokenizer

    vocab, merges = json.loads(trained_vocabulary(vocab_size))
    named: dict[str, Any] = {"extra_special_tokens": OMNI_TOKENS[family]} if family in OMNI_TOKENS else {}
    tokenizer = (Qwen3_5Tokenizer if family in QWEN3_5_TOKENIZER else Qwen2Tokenizer)(
        vocab=vocab,
        merges=[tuple(merge) for merge in merges],  # pyright: ignore[reportArgumentType]
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        **named,
    )
    tokenizer.add_tokens(list(SPECIAL_TOKENS), special_tokens=True)
    return tokenizer


@lru_cache(maxsize=8)
def trained_vocabulary(vocab_size: int) -> str:
    """Train the vocabulary and return it with its merges as JSON, a string, so that callers cannot change the cache."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
    from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

    bpe = Tokenizer(models.BPE())
    bpe.normalizer = normalizers.NFC()  # pyright: ignore[reportAttributeAccessIssue]
    bpe.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    bpe.pre_tokenizer = pre_tokenizers.Sequence(  # pyright: ignore[reportAttributeAccessIssue]
        [
            pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    bpe.train_from_iterator(corpus(), trainer)
    model = json.loads(bpe.to_str())["model"]
    return json.dumps([model["vocab"], model["merges"]])


# ---------------------------------------------------------------------- processors that take audio

_MEDIA = ("image", "video", "audio")


def _omni_tokens(placeholders: Sequence[str], start: str, end: str) -> dict[str, str]:
    tokens = {f"{kind}_token": f"<|{name}|>" for kind, name in zip(_MEDIA, placeholders, strict=True)}
    for kind in ("vision", "audio"):
        tokens |= {f"{kind}_bos_token": f"<|{kind}_{start}|>", f"{kind}_eos_token": f"<|{kind}_{end}|>"}
    return tokens


OMNI_TOKENS = {
    "qwen2_5_omni_thinker": _omni_tokens([kind.upper() for kind in _MEDIA], "bos", "eos"),
    "qwen3_omni_moe_thinker": _omni_tokens([f"{kind}_pad" for kind in _MEDIA], "start", "end"),
}
"""Special tokens of each family, by their attribute names in the tokenizer."""


def _omni_template(family: str) -> str:
    tokens = OMNI_TOKENS[family]
    around = {"image": "vision", "video": "vision", "audio": "audio"}
    written = {k: tokens[f"{x}_bos_token"] + tokens[f"{k}_token"] + tokens[f"{x}_eos_token"] for k, x in around.items()}
    return _chat_template(written)


# ---------------------------------------------------------------------- training text of the vocabulary


_WORDS = _split(
    "nasi goreng ayam bakar teh manis kopi susu roti coklat es jeruk mie rebus sate kambing air mineral "
    "rice chicken tea coffee milk bread sugar large small hot iced extra set special lunch dinner"
)
_KEYS = _split(
    "menu nm num unitprice cnt discountprice price itemsubtotal etc sub void_menu sub_total subtotal_price "
    "discount_price service_price othersvc_price tax_price total total_price total_etc cashprice changeprice "
    "creditcardprice emoneyprice menutype_cnt menuqty_cnt"
)
_SENTENCES = (
    "Describe this image. ",
    "What is the total of this receipt? ",
    "The total is {price} and the change is {price}. ",
    "Read the receipt and answer in JSON. ",
    "You are a helpful assistant. ",
    "system\nuser\nassistant\n",
    "How many items are on the receipt? There are {count} items. ",
    "<{count}.5 seconds>",
)


def corpus(*, num_documents: int = 400, seed: int = 0) -> Iterator[str]:
    """Yield made-up receipts as printed text, as Donut tokens and as JSON, and the sentences around them."""
    rng = random.Random(seed)
    for _ in range(num_documents):
        items = [_item(rng) for _ in range(rng.randint(1, 6))]
        yield "\n".join(f"{item['cnt']} {item['nm'].upper()} {item['price']}" for item in items)
        yield "<sep/>".join("".join(f"<s_{key}>{value}</s_{key}>" for key, value in item.items()) for item in items)
        yield json.dumps({"menu": items, rng.choice(_KEYS): _price(rng)})
        yield "".join(f"<s_{key}>{_price(rng)}</s_{key}>" for key in rng.sample(_KEYS, 4))
        yield rng.choice(_SENTENCES).format(price=_price(rng), count=rng.randint(0, 99))


def _item(rng: random.Random) -> dict[str, str]:
    name = " ".join(rng.choice(_WORDS) for _ in range(rng.randint(1, 3)))
    return {"nm": rng.choice((name, name.title())), "cnt": f"{rng.randint(1, 9)} x", "price": _price(rng)}


def _price(rng: random.Random) -> str:
    return f"{rng.randint(1, 250) * 500:,}"
