"""`vlmpack.probe` in the situations that users have: a processor, an adapter, packing enabled, low precision."""

from __future__ import annotations

import json
from functools import cache

import pytest
import torch
from fixtures.processors import tiny_model, tiny_processor
from peft import LoraConfig, get_peft_model

import vlmpack
from vlmpack.errors import BackendError, ConfigError, FamilyError
from vlmpack.model import StepConfig
from vlmpack.probing import Report
from vlmpack.probing.forward_passes import PlainPaddedPass
from vlmpack.probing.run import backends_for
from vlmpack.testing.comparison import FLOOR


def values(report: Report, part: str) -> dict[str, float]:
    return {check.name: check.value for check in report.checks if check.part == part and check.value is not None}


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2_5_vl", "internvl", "paligemma"])
def test_receipts_go_through_the_users_own_processor(family: str) -> None:
    processor = tiny_processor(family)
    report = vlmpack.probe(tiny_model(family, processor=processor), processor)
    assert report.verdict == "exact", report
    kinds = [sample.split(",")[0] for sample in report.samples]
    if family.startswith("qwen"):
        assert kinds == ["image", "image", "text", "text", "2 images", "video"]
    assert {*kinds} - {"video"} == {"image", "2 images", "text"}
    assert report.row_tokens > sum(int(sample.split()[-2]) for sample in report.samples), "no gaps"


@cache
def whole() -> tuple[Report, list[str]]:
    """The report on a text model, everything included, and what was said of its progress."""
    said: list[str] = []
    return vlmpack.probe(tiny_model("qwen3"), progress=said.append), said


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_an_adapter_is_probed_where_it_is() -> None:
    model = get_peft_model(tiny_model("qwen3_vl"), LoraConfig(target_modules=["q_proj", "v_proj"], r=2))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.normal_(std=0.5)  # at 0, as it starts, nothing would reach lora_A
    report = vlmpack.probe(model, plain=False, share_prefixes=False)
    assert report.verdict == "exact", report
    gradients = {name for name in values(report, "equality") if "gradient" in name}
    assert gradients == {f"{way}: gradient of language_model.layers.self_attn" for way in report.circumstances}


def test_a_frozen_model_has_logits_and_a_loss_to_compare() -> None:
    report = vlmpack.probe(tiny_model("qwen2_vl").requires_grad_(False), plain=False, share_prefixes=False)
    assert report.verdict == "exact", report
    assert report.plain == ()
    numbers = ("logits", "loss", "sample losses")
    assert set(values(report, "equality")) == {f"{way}: {what}" for way in report.circumstances for what in numbers}


def test_the_settings_of_an_enabled_model_are_probed() -> None:
    model = vlmpack.enable_packing(tiny_model("qwen3"), StepConfig(attention="eager_mask"))
    report = vlmpack.probe(model, plain=False, share_prefixes=False)
    assert (report.verdict, report.attention) == ("exact", "eager_mask")
    (pairs,) = [check for check in report.checks if check.name == "attended pairs"]
    assert pairs.finding == "not counted"
    assert pairs.detail.startswith("a dense mask")


def test_low_precision_has_the_limits_of_low_precision() -> None:
    report = vlmpack.probe(tiny_model("qwen3", dtype=torch.bfloat16))
    assert (report.verdict, report.dtype) == ("exact", "bfloat16"), report
    logits = next(check for check in report.checks if check.name == "row: logits")
    assert logits.allowed is not None
    assert logits.value is not None
    assert 1e-3 < logits.value <= logits.allowed < 0.5
    assert set(values(report, "isolation").values()) == {0}, "other samples are computed bit for bit"


def test_pairs_are_the_sum_of_squared_lengths() -> None:
    report = vlmpack.probe(tiny_model("qwen3_vl"), share_prefixes=False)
    lengths = [int(sample.split()[-2]) for sample in report.samples]
    work = values(report, "work")
    padding = report.row_tokens - sum(lengths)
    assert 0 <= work["attended pairs"] - sum(n * n for n in lengths) <= padding**2  # what a width needs goes along
    pairs = {one.name: one.pairs for one in report.plain}
    assert pairs["one row, [3, 1, T] positions"] == sum(lengths) ** 2
    assert pairs["a padded batch, 2D mask"] == len(lengths) * max(lengths) ** 2


def test_a_report_says_itself_and_goes_through_json() -> None:
    report, said = whole()
    assert said[:3] == ["each sample alone", "plain transformers", "a packed row with gaps"]
    assert {check.name for check in report.checks if check.finding == "absent"} >= {"vision", "recurrent state"}
    assert str(report).splitlines()[0] == "Qwen3ForCausalLM (as given), cpu, float32, sdpa_segments: exact"
    answer = json.loads(json.dumps(report.to_dict()))
    assert (answer["verdict"], answer["causes"]) == ("exact", [])
    assert len(answer["checks"]) == len(report.checks)


def test_every_back_end_that_can_serve_is_exact() -> None:
    model = tiny_model("qwen2_vl")
    names = backends_for(model)
    assert names == ["sdpa_segments", "eager_mask"]
    assert {vlmpack.probe(model, attention=name, plain=False, share_prefixes=False).verdict for name in names} == {
        "exact"
    }


def test_what_cannot_be_probed_is_refused() -> None:
    with pytest.raises(BackendError, match="torch_varlen"):
        vlmpack.probe(tiny_model("qwen3"), attention="torch_varlen")
    with pytest.raises(FamilyError, match=r"no \.\.\.ForConditionalGeneration or .* found in a Linear"):
        vlmpack.probe(torch.nn.Linear(2, 2))


def test_the_processor_of_another_model_is_refused() -> None:
    processor = tiny_processor("qwen3_vl")
    with pytest.raises(ConfigError, match=r"input_ids is \d+, but .* ids go from 0 to 130.*; give the processor"):
        vlmpack.probe(tiny_model("qwen3_vl"), processor)
    with pytest.raises(ConfigError, match="a patch of pixel_values has 1536 values, but 1176 in this"):
        vlmpack.probe(tiny_model("qwen2_5_vl", processor=processor, patch_size=14), processor)
    with pytest.raises(ConfigError, match=r"samples do not fit the model: .* placeholders.*give the processor"):
        vlmpack.probe(tiny_model("qwen3_vl", vocab_size=2000), processor)
    with pytest.raises(ConfigError, match="the processor is not InternVLProcessor, whose images the model takes"):
        vlmpack.probe(tiny_model("internvl", vocab_size=2000), tiny_processor("llava"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_that_gives_nan_alone_proves_nothing(dtype: torch.dtype) -> None:
    """Compared with NaN everything is as far as anything, and twice the model's own error would allow it."""
    model = tiny_model("qwen3", dtype=dtype)
    with torch.no_grad():
        model.model.norm.weight[3] = float("nan")
    report = vlmpack.probe(model)
    (check,) = report.checks
    assert (report.verdict, report.plain) == ("fails", ())
    assert "the logits of sample 0 has NaN or infinity without any packing" in check.detail


def test_gradients_that_are_infinite_alone_prove_nothing_either() -> None:
    model = tiny_model("qwen3")
    model.lm_head.weight.register_hook(lambda gradient: gradient / 0)
    (check,) = vlmpack.probe(model).checks
    assert (check.finding, "the gradient of lm_head.weight has" in check.detail) == ("fails", True)


@pytest.mark.slow
def test_within_autocast_the_weights_own_precision_counts() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        report = vlmpack.probe(tiny_model("qwen2_vl"), plain=False, share_prefixes=False)
    assert (report.verdict, report.dtype) == ("exact", "float32"), report


def test_a_model_that_cannot_compute_its_samples_is_a_finding() -> None:
    model = tiny_model("qwen3")

    def broken(module: torch.nn.Module, args: object) -> None:
        raise RuntimeError("no kernel for this device")

    model.lm_head.register_forward_pre_hook(broken)
    report = vlmpack.probe(model)
    (check,) = report.checks
    assert (report.verdict, check.detail) == ("fails", "RuntimeError: no kernel for this device")


def test_a_padded_batch_that_plain_transformers_cannot_compute_widens_no_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: object, samples: object) -> None:
        raise RuntimeError("a mask that this version does not take")

    monkeypatch.setattr(PlainPaddedPass, "__call__", broken)
    report = vlmpack.probe(tiny_model("qwen2_vl"), share_prefixes=False)
    assert report.verdict == "exact", report
    assert next(check.allowed for check in report.checks if check.name == "row: logits") == FLOOR.logits
    assert report.plain[-1].detail == "RuntimeError: a mask that this version does not take"
