"""The table of docs/families.md, made from the registry and from tiny configurations: `python tests/families/table.py`.

Every family of the registry is in the equality matrix of `tests/model/test_equality.py`. `test_table.py` compares the
page with this.
"""

from pathlib import Path
from typing import Any

from vlmpack.data.processor import FRAMES_AS_TILES
from vlmpack.families import Family
from vlmpack.families.registry import FAMILIES
from vlmpack.families.spans import ImageSpans, Prefix
from vlmpack.testing import tiny_config
from vlmpack.testing.samples import kinds_of

ROOT = Path(__file__).parents[2]
BEGIN, END = "<!-- families: made by tests/families/table.py -->\n", "<!-- end of families -->\n"
NAMES = {
    "qwen2_vl": "Qwen2-VL",
    "qwen2_5_vl": "Qwen2.5-VL",
    "qwen3_vl": "Qwen3-VL",
    "qwen3_vl_moe": "Qwen3-VL-MoE",
    "qwen3_5": "Qwen3.5",
    "qwen3_5_moe": "Qwen3.5-MoE",
    "qwen4_exp": "Qwen4-exp",
    "qwen3": "Qwen3",
    "qwen3_5_text": "Qwen3.5 (text)",
    "qwen3_5_moe_text": "Qwen3.5-MoE (text)",
    "qwen3_next": "Qwen3-Next",
    "qwen2_5_omni_thinker": "Qwen2.5-Omni (thinker)",
    "qwen3_omni_moe_thinker": "Qwen3-Omni (thinker)",
    "glm4v": "GLM-4.1V",
    "glm46v": "GLM-4.6V",
    "glm4v_moe": "GLM-4.5V",
    "glm_ocr": "GLM-OCR",
    "paddleocr_vl": "PaddleOCR-VL",
    "ernie4_5_vl_moe": "ERNIE 4.5 VL",
    "exaone4_5": "EXAONE 4.5",
    "lfm3_vl": "LFM3-VL",
    "kimi_k25": "Kimi K2.5",
    "internvl": "InternVL",
    "llava": "LLaVA",
    "llava_next": "LLaVA-NeXT",
    "llava_onevision": "LLaVA-OneVision",
    "smolvlm": "SmolVLM",
    "idefics3": "Idefics 3",
    "mistral3": "Mistral 3, Ministral 3",
    "lighton_ocr": "LightOnOCR",
    "minicpmv4_6": "MiniCPM-V 4.6",
    "gemma3": "Gemma 3",
    "gemma4": "Gemma 4",
    "gemma4_unified": "Gemma 4 12B",
    "paligemma": "PaliGemma 1, 2",
    "lfm2_vl": "LFM2-VL",
    "deepseek_ocr2": "DeepSeek-OCR 2",
    "cohere2_vision": "Command A Vision",
    "aya_vision": "Aya Vision",
    "lfm2": "LFM2",
    "lfm2_moe": "LFM2-MoE",
    "llama": "Llama",
    "llama4": "Llama 4",
    "llama4_text": "Llama 4 (text)",
    "mistral": "Mistral",
    "mixtral": "Mixtral",
    "qwen2": "Qwen2",
    "qwen3_moe": "Qwen3-MoE",
    "gemma2": "Gemma 2",
    "gemma3_text": "Gemma 3 (text)",
    "gemma4_text": "Gemma 4 (text)",
    "phi3": "Phi-3",
    "olmo2": "OLMo 2",
    "olmo3": "Olmo 3",
    "granite": "Granite",
    "cohere2": "Cohere 2",
    "smollm3": "SmolLM3",
    "glm4": "GLM-4",
    "glm4_moe": "GLM-4-MoE",
    "glm4_moe_lite": "GLM-4.7-Flash",
    "deepseek_v3": "DeepSeek-V3",
    "gpt_oss": "gpt-oss",
}
"""Names for people, by `model_type`."""
MECHANISMS = {
    "gated_delta": "gated delta layers",
    "experts": "experts",
    "per_sample": "sparse attention with its indexer, n-gram layers",
    "short_conv": "short convolutions",
    "query_scale": "position-scaled queries",
}
KINDS = ("text", "image", "video", "audio")
COLUMNS = ("Family", "`model_type`", "Text", "Image", "Video", "Audio", "transformers ≥", "Also separated")
HEAD = f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}\n"


def table() -> str:
    """One line a family; those that take most come first, in the order of the registry."""
    lines = []
    for model_type, family in FAMILIES.items():
        config = tiny_config(model_type)
        kinds = {"text", *kinds_of(config), *(["audio"] if family.has_audio else [])}
        kinds |= {"video"} if family.has_vision and family.processor in FRAMES_AS_TILES else set()
        ticks = ["✓" if kind in kinds else "" for kind in KINDS]
        apart = ", ".join(kept_apart(family, family.text_config(config)))
        version = ".".join(map(str, family.oldest_transformers))
        row = " | ".join([NAMES[model_type], f"`{model_type}`", *ticks, version, apart])
        lines.append((-len(kinds & set(KINDS)), f"| {row} |\n"))
    return HEAD + "".join(line for _, line in sorted(lines, key=lambda line: line[0]))


def kept_apart(family: Family, text_config: Any) -> list[str]:
    """What a row keeps apart besides attention and positions: by the family's mechanisms and tiny configuration."""
    layers = getattr(text_config, "layer_types", None) or ["sliding_attention"]
    has_windows = "sliding_attention" in layers and bool(getattr(text_config, "sliding_window", None))
    patterns = {
        "sliding windows": has_windows,
        "chunks": "chunked_attention" in layers,
        "attention sinks": text_config.model_type == "gpt_oss",
        "bidirectional image tokens": isinstance(family.bidirectional, ImageSpans),
        "bidirectional prefixes": isinstance(family.bidirectional, Prefix),
        "scaled or capped logits": family.logits.__name__ != "plain_logits",
    }
    mechanisms = [words for name, words in MECHANISMS.items() if family.has(name)]
    return mechanisms + [words for words, there in patterns.items() if there]


PAGE = ROOT / "docs" / "families.md"


def written(text: str) -> str:
    """The page with the table in its place."""
    before, rest = text.split(BEGIN)
    return before + BEGIN + table() + END + rest.split(END)[1]


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
