"""Weights of checkpoints that have other names than the model: a resumed run begins with them, not with its own."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import slow
from safetensors.torch import load_file, save_file
from training import Samples, arguments, collator, logged, receipts, weights

from vlmpack.errors import ConfigError
from vlmpack.model import disable_packing, enable_packing, is_packing
from vlmpack.testing import tiny_model
from vlmpack.trainer import PackedTrainer
from vlmpack.trainer.checkpoints import load_renamed, stored_names

RENAMED = "qwen2_5_vl"
"""A family whose files have the names of its first release."""


def small(family: str = RENAMED, seed: int = 0) -> Any:
    return tiny_model(family, seed=seed, layers=1, vision_depth=1)


def trained(family: str, folder: Path, resumed_from: Path | None = None, **settings: Any) -> PackedTrainer:
    """Four steps of two samples, or those that are left of them; a resumed run begins with another model."""
    model = enable_packing(small(family, seed=0 if resumed_from is None else 9))
    samples = receipts(model) * 2
    settings = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "remove_unused_columns": False, **settings}
    settings["train_sampling_strategy"] = "sequential"
    data: dict[str, Any] = {"train_dataset": Samples(samples), "eval_dataset": Samples(samples[:2])}
    run = PackedTrainer(model, arguments(folder, **settings), collator("packed"), **data, eval_packing=False)
    run.train(resume_from_checkpoint=resumed_from if resumed_from is None else str(resumed_from))
    return run


def equal(first: Any, second: Any) -> bool:
    ours, theirs = weights(first), weights(second)
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("family", [RENAMED, *slow("qwen3_vl", "gemma3")])
def test_a_resumed_run_ends_with_the_weights_of_an_unbroken_one(family: str, tmp_path: Path) -> None:
    whole = trained(family, tmp_path)
    resumed = trained(family, tmp_path / "resumed", tmp_path / "checkpoint-2")
    assert equal(resumed.model, whole.model)
    assert logged(resumed) == logged(whole)


def test_the_best_model_is_loaded_at_the_end(tmp_path: Path) -> None:
    """The first checkpoint, whose loss is the greater one."""
    settings = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True, "greater_is_better": True}
    run = trained(RENAMED, tmp_path, **settings, metric_for_best_model="eval_loss")
    assert run.state.best_global_step == 2
    model: Any = run.model
    stored = type(disable_packing(model)).from_pretrained(tmp_path / "checkpoint-2")
    assert equal(run.model, stored)


def saved(folder: Path, **settings: Any) -> Any:
    model = small()
    model.save_pretrained(folder, **settings)
    assert not stored_names(folder) <= model.state_dict().keys()
    return model


def test_weights_in_several_files_are_loaded_into_an_enabled_model(tmp_path: Path) -> None:
    model, other = saved(tmp_path, max_shard_size="50KB"), enable_packing(small(seed=1))
    assert len([*tmp_path.glob("*.safetensors")]) > 1
    assert load_renamed(other, tmp_path)
    assert is_packing(other)
    assert equal(other, model)


def test_bfloat16_weights_are_loaded_bit_for_bit(tmp_path: Path) -> None:
    small().bfloat16().save_pretrained(tmp_path)
    other = small(seed=1).bfloat16()
    assert load_renamed(other, tmp_path)
    assert equal(other, small().bfloat16())


def test_files_with_the_names_of_the_model_are_left_to_trainer(tmp_path: Path) -> None:
    model = small("qwen3_vl")
    model.save_pretrained(tmp_path)
    assert not load_renamed(model, tmp_path)


def test_a_checkpoint_that_lacks_a_weight_is_refused(tmp_path: Path) -> None:
    model = saved(tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "part")
    tensors = load_file(tmp_path / "part" / "model.safetensors")
    lost = next(name for name in tensors if "q_proj.weight" in name)
    save_file({name: x for name, x in tensors.items() if name != lost}, tmp_path / "part" / "model.safetensors")
    with pytest.raises(ConfigError, match=r"part lacks 1 weights of Qwen2_5_VL.*, .*q_proj\.weight among them"):
        load_renamed(model, tmp_path / "part")
