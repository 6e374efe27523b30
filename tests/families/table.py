"""The families tables, made of the registry and of tiny configurations: `python tests/families/table.py`.

The README and the page for newcomers have a line for what families take. Whatever the registry has is in the equality
matrix of `tests/model/test_equality.py`. `test_table.py` compares the files with this.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vlmpack.families import Family
from vlmpack.families.registry import FAMILIES
from vlmpack.families.spans import ImageSpans, Prefix
from vlmpack.testing import tiny_config
from vlmpack.testing.samples import kinds_of

ROOT = Path(__file__).parents[2]
BEGIN, END = "<!-- families: made by tests/families/table.py -->\n", "<!-- end of families -->\n"
HEAD = "| Takes | Families (kept apart besides attention and positions) |\n|---|---|\n"
NAMES = {
    "qwen2_vl": "Qwen2-VL",
    "qwen2_5_vl": "Qwen2.5-VL",
    "qwen3_vl": "Qwen3-VL",
    "qwen3_vl_moe": "Qwen3-VL-MoE",
    "qwen3_5": "Qwen3.5",
    "qwen3_5_moe": "Qwen3.5-MoE",
    "qwen4_exp": "Qwen4-exp",
    "qwen3": "Qwen3",
    "qwen3_next": "Qwen3-Next",
    "qwen2_5_omni_thinker": "Qwen2.5-Omni (thinker)",
    "qwen3_omni_moe_thinker": "Qwen3-Omni (thinker)",
    "glm4v": "GLM-4.1V",
    "glm46v": "GLM-4.6V",
    "glm4v_moe": "GLM-4.5V",
    "glm_ocr": "GLM-OCR",
    "paddleocr_vl": "PaddleOCR-VL",
    "ernie4_5_vl_moe": "ERNIE 4.5 VL",
    "kimi_k25": "Kimi K2.5",
    "internvl": "InternVL",
    "llava": "LLaVA",
    "llava_next": "LLaVA-NeXT",
    "llava_onevision": "LLaVA-OneVision",
    "smolvlm": "SmolVLM",
    "idefics3": "Idefics 3",
    "mistral3": "Mistral 3, Ministral 3",
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
    "qwen2": "Qwen2",
    "qwen3_moe": "Qwen3-MoE",
    "gemma2": "Gemma 2",
    "gemma3_text": "Gemma 3 (text)",
    "phi3": "Phi-3",
    "olmo3": "Olmo 3",
    "granite": "Granite",
    "cohere2": "Cohere 2",
    "smollm3": "SmolLM3",
    "glm4_moe": "GLM-4-MoE",
    "deepseek_v3": "DeepSeek-V3",
    "gpt_oss": "gpt-oss",
}
"""Names for people, by `model_type`."""
MECHANISMS = {
    "gated_delta": "gated delta layers",
    "experts": "experts",
    "per_sample": "sparse attention with its indexer, n-gram layers",
    "short_conv": "short convolutions",
    "query_scale": "queries scaled by place",
}


def rows() -> dict[tuple[str, str], list[str]]:
    """Families by what they take and what is kept apart, in the order of the registry."""
    found: dict[tuple[str, str], list[str]] = {}
    for model_type, family in FAMILIES.items():
        found.setdefault(properties(model_type, family), []).append(model_type)
    return found


def table() -> str:
    """One line for all families that take the same; those that take most come first."""
    lines: dict[str, list[str]] = {}
    for (takes, apart), names in rows().items():
        families = ", ".join(NAMES[name] for name in names)
        lines.setdefault(takes, []).append(f"{families} ({apart})" if apart else families)
    of_most = sorted(lines.items(), key=lambda line: -len(line[0]))
    return HEAD + "".join(f"| {takes} | {'; '.join(families)} |\n" for takes, families in of_most)


def properties(model_type: str, family: Family) -> tuple[str, str]:
    """What a family takes, and what is kept apart: as its descriptor and its tiny configuration have it."""
    config = tiny_config(model_type)
    kinds = kinds_of(config)
    takes = ["text", *["images"] * ("image" in kinds), *["videos"] * ("video" in kinds), *["audio"] * family.has_audio]
    apart = [words for name, words in MECHANISMS.items() if family.has(name)]
    apart += [words for words, there in _patterns(family, family.text_config(config)) if there]
    return ", ".join(takes), ", ".join(apart)


def _patterns(family: Family, text_config: Any) -> list[tuple[str, bool]]:
    kinds = getattr(text_config, "layer_types", None) or ["sliding_attention"]
    has_windows = "sliding_attention" in kinds and bool(getattr(text_config, "sliding_window", None))
    return [
        ("sliding windows", has_windows),
        ("chunks", "chunked_attention" in kinds),
        ("attention sinks", text_config.model_type == "gpt_oss"),
        ("image tokens that see later ones", isinstance(family.sees, ImageSpans)),
        ("prefixes that see all of themselves", isinstance(family.sees, Prefix)),
        ("scaled or capped logits", family.logits.__name__ != "plain_logits"),
    ]


FILES = (ROOT / "README.md", ROOT / "docs" / "is_it_for_me.md")


def written(text: str) -> str:
    """A file with the table in its place."""
    before, rest = text.split(BEGIN)
    return before + BEGIN + table() + END + rest.split(END)[1]


if __name__ == "__main__":
    for path in FILES:
        path.write_text(written(path.read_text(encoding="utf-8")), encoding="utf-8")
