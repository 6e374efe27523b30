"""The probe hands on pixels in the type of the model's weights, as `inputs.to(model.dtype)` does: some models of
transformers cast none, whatever the processor makes."""

from __future__ import annotations

import pytest
import torch
from fixtures.processors import tiny_model, tiny_processor

from vlmpack.families import family_named
from vlmpack.layout import pack
from vlmpack.probing import probe
from vlmpack.testing import Sample, padded
from vlmpack.testing.comparison import run_alone, run_packed
from vlmpack.testing.samples import sample_like, synthetic_samples

CAST_NOTHING = ("kimi_k25", "deepseek_ocr2", "llama4")


def with_pixels(family: str, dtype: torch.dtype) -> list[Sample]:
    """A sample with an image, its pixels in this type."""
    names, samples = family_named(family).pixel_names, synthetic_samples(tiny_model(family).config)
    sample = next(each for each in samples if "pixel_values" in each)
    return [sample_like(sample, {name: x.to(dtype) if name in names else x for name, x in sample.items()})]


@pytest.mark.parametrize("family", CAST_NOTHING)
def test_an_enabled_model_takes_what_the_model_itself_takes(family: str) -> None:
    """Pixels go to it as they come: those of another type raise, as they do without packing, but under autocast."""
    samples = with_pixels(family, torch.float32)
    model = tiny_model(family, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        run_alone(model, samples, gradients=False)
        run_packed(model, pack(padded(samples)), samples, gradients=False)
    with pytest.raises(RuntimeError, match=r"should be the same|same dtype"):
        run_packed(model, pack(padded(samples)), samples, gradients=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "dtype"), [("kimi_k25", torch.bfloat16), ("llama4", torch.float32), ("llama4", torch.bfloat16)]
)
def test_so_it_is_with_what_its_processor_makes(family: str, dtype: torch.dtype) -> None:
    """Llama 4's makes pixels in bfloat16 with torchvision and in float32 with Pillow, the others' in float32."""
    processor = tiny_processor(family)
    report = probe(tiny_model(family, processor=processor, dtype=dtype), processor, share_prefixes=False)
    assert report.verdict == "exact", report
    assert {baseline.verdict for baseline in report.plain} <= {"exact", "leaks", "differs"}
