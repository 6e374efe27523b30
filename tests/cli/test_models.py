"""A model by name: its own weights if they fit, otherwise a tiny copy with the same peculiarities."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures.processors import tiny_model, tiny_processor

from vlmpack.cli import models
from vlmpack.cli.models import load
from vlmpack.data import save_processor
from vlmpack.errors import ConfigError, FamilyError
from vlmpack.families import family_named
from vlmpack.layout import pack
from vlmpack.testing import mixed_samples, padded, tiny_config
from vlmpack.testing.comparison import FLOOR, compare, run_alone, run_packed

CPU = torch.device("cpu")


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen4_exp"])
def test_weights_that_fit_are_loaded_with_their_processor(family: str, tmp_path: Path) -> None:
    processor = tiny_processor(family)
    model = tiny_model(family, processor=processor)
    model.save_pretrained(tmp_path)
    save_processor(processor, tmp_path)
    loaded = load(str(tmp_path), device=CPU, dtype=torch.float32)
    assert loaded.weights == "its own weights"
    assert loaded.processor.tokenizer.get_vocab() == processor.tokenizer.get_vocab()
    assert torch.equal(loaded.model.lm_head.weight, model.lm_head.weight)


def test_a_model_without_a_processor_is_probed_with_random_ids(tmp_path: Path) -> None:
    tiny_model("qwen3", dtype=torch.bfloat16).save_pretrained(tmp_path)
    loaded = load(str(tmp_path), device=CPU, dtype=torch.bfloat16)
    assert loaded.processor is None
    assert loaded.weights == "its own weights"
    assert loaded.model.dtype == torch.bfloat16


def test_weights_that_do_not_fit_make_a_tiny_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_model("qwen3_vl").save_pretrained(tmp_path)
    monkeypatch.setattr(models, "free_bytes", lambda device: 1 << 29)
    loaded = load(str(tmp_path), device=CPU, dtype=torch.float32)
    assert loaded.weights.startswith("a tiny copy with random weights: its 0.00 billion weights need 1 GiB")
    assert loaded.weights.endswith("0 GiB are free")
    monkeypatch.setattr(models, "free_bytes", lambda device: None)
    assert "is unknown" in load(str(tmp_path), device=CPU, dtype=torch.float32).weights


def test_a_folder_without_weights_or_the_users_wish_makes_one_too(tmp_path: Path) -> None:
    tiny_config("qwen3_vl").save_pretrained(tmp_path)
    assert load(str(tmp_path), device=CPU, dtype=torch.float32).weights.endswith("the folder holds no weights")
    assert load(str(tmp_path), device=CPU, dtype=torch.float32, tiny=True).weights.endswith("as asked")


def test_free_memory_is_the_least_that_anybody_says(tmp_path: Path) -> None:
    free = models.free_bytes(CPU, tmp_path)
    assert free is not None
    assert 1 << 20 < free < 1 << 50
    (tmp_path / "memory.max").write_text("3000\n")
    (tmp_path / "memory.current").write_text("1000\n")
    assert models.free_bytes(CPU, tmp_path) == 2000
    (tmp_path / "memory.max").write_text("max\n")
    assert models.free_bytes(CPU, tmp_path) > 1 << 20


def test_nothing_there_is_said_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"model .*nowhere cannot be read \(.*; give a hub id or a folder with a whole"
    ):
        load(str(tmp_path / "nowhere"), device=CPU, dtype=torch.float32)


@pytest.mark.parametrize("size", [0, 20, 5000, "another model's"])
def test_weights_that_are_cut_off_or_of_another_model_are_said_in_one_line(size: Any, tmp_path: Path) -> None:
    tiny_model("qwen3").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    if isinstance(size, int):
        file.write_bytes(file.read_bytes()[:size])
    else:
        tiny_config("qwen3", hidden=96).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"^the weights of .+ cannot be read \(.+\); --tiny probes a small") as caught:
        load(str(tmp_path), device=CPU, dtype=torch.float32)
    assert len(str(caught.value).splitlines()) == 1


def test_a_family_that_would_leak_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2_5_omni"}))
    with pytest.raises(FamilyError, match="qwen2_5_omni"):
        load(str(tmp_path), device=CPU, dtype=torch.float32)


# ---------------------------------------------------------------------- tiny copies


@pytest.mark.parametrize("family", ["qwen3", "qwen2_5_vl", "qwen3_5_moe"])
def test_a_tiny_copy_keeps_all_settings_that_are_no_sizes(family: str) -> None:
    large = tiny_config(family, hidden=192, heads=4, kv_heads=2, layers=5, vision_depth=5).to_dict()
    text = large.get("text_config", large)
    text.update(rms_norm_eps=1e-3, attention_bias=True)
    text["rope_parameters"] |= {"rope_theta": 1234.0}
    copied = tiny_config(family, like=type(tiny_config(family)).from_dict(large))
    small = copied.get_text_config().to_dict()
    assert (copied.model_type, small["num_hidden_layers"], small["hidden_size"]) == (family, 2, 2 * 48)
    for name in ("rope_parameters", "rms_norm_eps", "attention_bias"):
        assert small.get(name) == text.get(name), name


@pytest.mark.parametrize("family", ["gemma3", "qwen3_next"])
def test_a_tiny_copy_of_a_large_configuration_is_exact(family: str, tmp_path: Path) -> None:
    config = tiny_config(family, hidden=192, heads=4, kv_heads=2, layers=5)
    config.save_pretrained(tmp_path)
    loaded = load(str(tmp_path), device=CPU, dtype=torch.float32)
    assert loaded.weights.startswith("a tiny copy with random weights")
    assert sum(p.numel() for p in loaded.model.parameters()) < models.count_weights(config, family_named(family))
    samples = mixed_samples(loaded.model.config)
    errors = compare(run_packed(loaded.model, pack(padded(samples)), samples), run_alone(loaded.model, samples))
    assert all(each.error <= each.allowed for each in errors.measured(FLOOR))
