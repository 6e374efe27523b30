"""PaliGemma's prefixes: prompt and images see each other in both directions, as the batch says, and answers do not.
(Packed equals alone: `test_equality.py`.)"""

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from chats import needs
from equality import alone_through, check_outputs, check_packed, limits_of
from parts import parts_of
from torch import nn
from transformers import AutoConfig, AutoModelForImageTextToText

from vlmpack.errors import LayoutError
from vlmpack.families.spans import prefixes_of_row
from vlmpack.layout import Segments, SlotRule, pack, share
from vlmpack.layout.device import nothing_on_host
from vlmpack.model import PackedStep, enable_packing
from vlmpack.model.mechanisms.attention import layer_masks
from vlmpack.testing import mixed_samples, padded, tiny_config, tiny_model
from vlmpack.testing.samples import sample_like

pytestmark = [
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),  # transformers' own
    needs("paligemma"),
]
LIMITS = limits_of("gemma2")


def fresh(text_type: str = "gemma2", **sizes: Any) -> Any:
    """The second version, on Gemma 2, or the first one: without windows and softcaps."""
    if text_type == "gemma2":
        return tiny_model("paligemma", seed=3, **{"layers": 2, **sizes})
    config = tiny_config("paligemma", layers=2).to_dict()
    text = {**config["text_config"], "model_type": text_type}
    for name in ("layer_types", "sliding_window", "final_logit_softcapping", "attn_logit_softcapping"):
        del text[name]
    settings = {name: config[name] for name in ("vision_config", "image_token_index", "projection_dim", "hidden_size")}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model: nn.Module = AutoModelForImageTextToText.from_config(
            AutoConfig.for_model("paligemma", text_config=text, **settings), attn_implementation="sdpa"
        )
        for weight in model.parameters():
            if weight.ndim > 1:
                nn.init.normal_(weight, std=weight[0].numel() ** -0.5)
    return model.train()


@functools.cache
def truth(text_type: str = "gemma2") -> Any:
    model = fresh(text_type)
    return alone_through(model, mixed_samples(model.config, seed=5, kinds=("image", "text", "images"), text=(3, 12)))


@pytest.mark.parametrize("text_type", ["gemma", "gemma2"])
def test_packed_equals_alone(text_type: str) -> None:
    own, model = truth(text_type), fresh(text_type)
    columns = [sample["token_type_ids"] for sample in own.samples]
    windows = {mask.window for mask in layer_masks(parts_of(model)).values()}
    assert windows == ({None} if text_type == "gemma" else {None, 5})
    assert all(0 < column.sum() < len(column) for column in columns)
    assert max((column == 0).sum() for column in columns) > 2 * 5
    assert model.model.language_model.layers[0].self_attn.is_causal is False  # its own code always passes a mask
    check_packed(own, model, limits=LIMITS)


def batch_with(column: Any) -> dict[str, Any]:
    batch = padded(truth().samples, metadata=False).to_hf()
    return {**batch, "token_type_ids": None if column is None else column(batch["token_type_ids"])}


def test_a_batch_without_its_column_is_refused() -> None:
    """Without a mask, transformers itself would let the answer's tokens see later ones with sdpa."""
    model = enable_packing(fresh())
    for batch in (batch_with(None), {**pack(padded(truth().samples)).to_hf(), "token_type_ids": None}):
        with pytest.raises(LayoutError, match=r"token_type_ids is missing, .* as the model's own processor returns"):
            model(**batch)


@pytest.mark.parametrize(
    ("column", "match"),
    [
        (lambda types: 1 - types, "sample 0, .*: token_type_ids are no prefix and its suffix"),
        (lambda types: 2 * types, "sample 0, token 27: token_type_ids are no prefix and its suffix"),
        (lambda types: types.float(), r"token_type_ids is torch.float32 \[1, \d+\] but input_ids is"),
        (lambda types: types[:, 1:], r"token_type_ids is \[3, \d+\] but input_ids is \[3, \d+\]"),
    ],
    ids=["reversed", "other numbers", "no whole numbers", "shorter"],
)
def test_a_column_that_is_no_prefix_and_suffix_is_refused(column: Any, match: str) -> None:
    with pytest.raises(LayoutError, match=match):
        enable_packing(fresh())(**batch_with(column))


def test_a_sample_may_be_all_prefix_or_all_suffix() -> None:
    first, second, third = truth().samples
    samples = [
        sample_like(first, {**first, "token_type_ids": torch.zeros_like(first["input_ids"])}),
        sample_like(second, {**second, "token_type_ids": torch.ones_like(second["input_ids"])}),
        third,
    ]
    own = alone_through(fresh(), samples)
    check_packed(own, fresh(), limits=LIMITS)


def test_prefixes_of_the_metadata_are_compared_on_the_host_and_on_a_device() -> None:
    segments = Segments.from_lengths([4, 3, 2], SlotRule(multiple=5))
    column = torch.tensor([[0, 0, 1, 1, 0, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0]])  # padding does not matter
    known = (2, 0, 2)
    runs = ((0, 2), (10, 12))
    assert prefixes_of_row(column, segments, (), "types") == prefixes_of_row(column, segments, known, "types") == runs
    for other, message in (
        ((2, 0, 1), "sample 2, token 1: prefixes of the host metadata"),
        ((2, 0), "^pref"),
    ):
        with pytest.raises(LayoutError, match=message):
            prefixes_of_row(column, segments, other, "types")
    with nothing_on_host():
        assert prefixes_of_row(column, segments, known, "types") == runs
        with pytest.raises(RuntimeError, match="prefixes of the host metadata"):
            prefixes_of_row(column, segments, (2, 0, 1), "types")


def test_samples_that_share_tokens_and_not_their_prefix_are_refused() -> None:
    """Tokens after a shared beginning would be computed with another one's prefix."""
    text = truth().samples[1]
    ids = text["input_ids"][:6]
    columns = [torch.tensor([0] * n + [1] * (6 - n)) for n in (3, 3, 4)]
    samples = [sample_like(text, {"input_ids": ids, "labels": ids, "token_type_ids": column}) for column in columns]
    step = PackedStep(fresh())
    shared = share(pack(padded(samples[:2])), min_shared=1)
    assert shared.tree is not None
    own = alone_through(fresh(), samples[:2])
    check_outputs(own, step(shared, logits=True), LIMITS)
    row = pack(padded(samples[1:]))
    assert share(row, min_shared=1).tree is None
    with pytest.raises(LayoutError, match="token_type_ids of tokens that the prefix tree says are shared differ"):
        step(share(replace(row, metadata=None), min_shared=1))
