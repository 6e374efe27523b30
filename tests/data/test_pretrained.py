"""A processor written to a folder and read back does what it did before, without torchvision."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from chats import FAMILIES
from PIL import Image

from vlmpack.data import tiny_processor
from vlmpack.data.pretrained import load_processor, save_processor
from vlmpack.errors import FamilyError
from vlmpack.families.tiny import tiny_config


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_saved_is_what_is_loaded(family: str, tmp_path: Path) -> None:
    before = tiny_processor(family)
    tiny_config(family, processor=before).save_pretrained(tmp_path)
    save_processor(before, tmp_path)
    after = load_processor(str(tmp_path))
    assert type(after) is type(before)
    assert type(after.tokenizer) is type(before.tokenizer)
    assert after.chat_template == before.chat_template

    content = [{"type": "image"}, {"type": "text", "text": "What is the total?"}]
    messages = [{"role": "user", "content": content}]
    image = Image.effect_noise((123, 77), 50).convert("RGB")
    batches = [
        processor(text=[processor.apply_chat_template(messages)], images=[image], return_tensors="np")
        for processor in (before, after)
    ]
    assert set(batches[0]) == set(batches[1])
    for name in batches[0]:
        np.testing.assert_array_equal(batches[0][name], batches[1][name])


def test_another_family_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(FamilyError, match="a llama; there are qwen2_vl, qwen2_5_vl, qwen3_vl"):
        load_processor(str(tmp_path))
