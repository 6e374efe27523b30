"""A model that takes boundaries by name gets those of each sample; what it computes is what transformers does alone."""

import sys
from collections.abc import Callable
from dataclasses import replace
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from host_syncs import recorded_syncs
from megatron_models import import_megatron
from torch import nn
from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import load_balancing_loss_func

from vlmpack.errors import ConfigError, LayoutError
from vlmpack.layout import PaddedBatch, Segments, SlotRule, pack, roll_left
from vlmpack.layout.batch import IGNORE
from vlmpack.layout.device import nothing_on_host
from vlmpack.model import ThdStep, masked_router_losses
from vlmpack.testing import mixed_samples, padded, tiny_model

EXAMPLE = Path(__file__).parents[2] / "examples" / "thd_model.py"
GAPS = SlotRule(multiple=8, row_multiple=48)
CLOSE: Any = {"atol": 2e-5, "rtol": 1e-4}


@pytest.fixture(scope="module", autouse=True)
def megatron_core() -> None:
    import_megatron()


@pytest.fixture(scope="module")
def example() -> Any:
    spec = spec_from_file_location("thd_model", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["thd_model"] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def reference() -> Any:
    """Plain transformers: two layers of experts, and a vision tower with deepstack features."""
    return tiny_model("qwen3_vl_moe", layers=2, vision_depth=2)


@pytest.fixture(scope="module")
def samples(reference: Any) -> list[Any]:
    return mixed_samples(reference.config, seed=1, kinds=("image", "text", "images", "text"))


# ---------------------------------------------------------------------- what is handed over


class Takes(nn.Module):
    """A model of one embedding that keeps what it was called with; `forward` is replaced by the tests."""

    def __init__(self, vocabulary: int = 64, **config: Any) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, vocabulary)
        self.config = SimpleNamespace(**config)
        self.called: dict[str, Any] = {}

    def losses(self, input_ids: torch.Tensor, labels: torch.Tensor, **others: Any) -> torch.Tensor:
        self.called = {"input_ids": input_ids, "labels": labels, **others}
        logits = self.embedding(input_ids)
        return F.cross_entropy(logits[0], labels[0].clamp(min=0), reduction="none")[None]


class Everything(Takes):
    def forward(
        self,
        tokens: torch.Tensor,
        labels: torch.Tensor,
        loss_mask: Any,
        position_ids: Any,
        attention_mask: Any,
        cu_seqlens_q: Any,
        cu_seqlens_kv: Any,
        cu_seqlens_q_padded: Any,
        cu_seqlens_kv_padded: Any,
        max_seqlen_q: Any,
        max_seqlen_kv: Any,
        packed_seq_params: Any,
        rope_cu_seqlens: Any,
        padding_mask: Any,
        temperature: float = 1.0,
    ) -> torch.Tensor:
        given = {name: value for name, value in locals().items() if name not in ("self", "tokens", "labels")}
        return self.losses(tokens, labels, **given)


class Plain(Takes):
    def forward(
        self, input_ids: torch.Tensor, labels: torch.Tensor, cu_seqlens_q: torch.Tensor, position_ids: torch.Tensor
    ) -> torch.Tensor:
        return self.losses(input_ids, labels, cu_seqlens_q=cu_seqlens_q, position_ids=position_ids)


class Weighted(Takes):
    def forward(
        self, input_ids: Any, labels: Any, packed_seq_params: Any, position_ids: Any, weight: Any = None
    ) -> torch.Tensor:
        return self.losses(input_ids, labels, position_ids=position_ids, weight=weight)


def texts(*lengths: int) -> PaddedBatch:
    """Samples of 1, 2, 3, ... tokens' ids, each token a target of the one before."""
    ids = torch.arange(1, 1 + len(lengths) * max(lengths)).view(len(lengths), -1) % 60
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    return PaddedBatch(input_ids=ids * mask, attention_mask=mask.long(), labels=ids.masked_fill(~mask, IGNORE))


def test_real_and_padded_boundaries_are_apart_under_their_names() -> None:
    model = Everything()
    ThdStep(model, slots=SlotRule(multiple=4))(texts(3, 5, 2), temperature=0.5)
    called = model.called
    for axis in ("q", "kv"):
        assert called[f"cu_seqlens_{axis}"].tolist() == [0, 3, 8, 10]
        assert called[f"cu_seqlens_{axis}_padded"].tolist() == [0, 4, 12, 16]
        assert called[f"max_seqlen_{axis}"] == 8
    assert called["rope_cu_seqlens"].tolist() == [0, 3, 8, 10]
    assert called["padding_mask"][0].nonzero()[:, 0].tolist() == [3, 9, 10, 11, 14, 15]
    assert called["position_ids"].tolist() == [[0, 1, 2, 0, 0, 1, 2, 3, 4, 0, 0, 0, 0, 1, 0, 0]]
    assert called["loss_mask"].tolist() == [[1, 1, 0, 0, 1, 1, 1, 1, 0, 0, 0, 0, 1, 0, 0, 0]]
    assert called["attention_mask"] is None
    assert called["temperature"] == 0.5
    params = called["packed_seq_params"]
    assert params.qkv_format == "thd"
    assert params.cu_seqlens_q.tolist() == [0, 3, 8, 10]
    assert params.cu_seqlens_kv_padded.tolist() == [0, 4, 12, 16]


def test_finer_restarts_are_handed_over_in_real_tokens() -> None:
    model = Everything()
    ThdStep(model, slots=SlotRule(multiple=4))(texts(3, 5, 2), rope_cu_seqlens=[0, 4, 6, 12, 16])
    assert model.called["rope_cu_seqlens"].tolist() == [0, 3, 5, 8, 10]
    assert model.called["position_ids"][0, 4:9].tolist() == [0, 1, 0, 1, 2]


def takes_media(
    input_ids: Any, cu_seqlens_q: Any, position_ids: Any = None, pixel_values: Any = None, image_grid_thw: Any = None
) -> torch.Tensor:
    return torch.zeros(input_ids.shape, requires_grad=True)


def test_positions_are_time_height_and_width(reference: Any) -> None:
    texts_alone = mixed_samples(reference.config, seed=2, kinds=("text", "text"))
    step = ThdStep(takes_media, config=reference.config)
    places = torch.cat([torch.arange(len(sample["input_ids"])) for sample in texts_alone])
    assert torch.equal(step.inputs(padded(texts_alone)).arguments["position_ids"], places.expand(3, 1, -1))


def test_an_object_stands_for_packed_seq_params_without_megatron_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[ThdStep.__module__], "version_of", lambda package: None)
    model = Everything()
    ThdStep(model)(texts(3, 5))
    assert model.called["packed_seq_params"].cu_seqlens_q.tolist() == [0, 3, 8]
    assert model.called["packed_seq_params"].cu_seqlens_q_padded is None


def test_a_wrapper_s_model_is_asked_for_names() -> None:
    class Wrapper(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return self.module(*args, **kwargs)

    plain = Plain()
    expected = ThdStep(plain)(texts(3, 5))
    assert torch.equal(ThdStep(Wrapper(Wrapper(plain)))(texts(3, 5)).loss, expected.loss)


def test_nothing_waits_for_the_device(example: Any, reference: Any, samples: list[Any]) -> None:
    step = ThdStep(example.ThdQwen3VLMoe(reference), slots=GAPS, config=reference.config)
    batch = padded(samples)
    logits = torch.zeros(1, pack(batch, rule=GAPS).segments.total, 512)
    with nothing_on_host(), recorded_syncs(torch.device("cpu")) as syncs:
        step.result(logits, step.inputs(batch))
    assert syncs == []


# ---------------------------------------------------------------------- what comes back


def test_losses_and_logits_of_a_row_give_the_same_result() -> None:
    model, batch = Plain(), replace(texts(3, 5, 2), loss_weights=torch.rand(3, 5))
    step = ThdStep(model)
    inputs = step.inputs(batch)
    losses, logits = model(**inputs.arguments), model.embedding(inputs.row.input_ids)
    forms = (losses, losses[0], logits, logits[0], (logits, None), {"losses": losses}, {"logits": logits})
    results = [step.result(form, inputs, num_items_in_batch=20) for form in forms]
    expected = [
        (F.cross_entropy(model.embedding(ids[:-1]), ids[1:], reduction="none") * weights[1 : len(ids)]).mean()
        for ids, weights in zip(rows_of(batch), batch.loss_weights, strict=True)
    ]
    for result in results:
        torch.testing.assert_close(result.sample_losses, torch.stack(expected), **CLOSE)
        torch.testing.assert_close(result.loss, result.loss_sum / 20)
    assert results[2].logits is not None
    assert results[0].logits is None
    assert results[0].sample_targets.tolist() == [2, 4, 1]


def rows_of(batch: PaddedBatch) -> list[torch.Tensor]:
    return [ids[mask.bool()] for ids, mask in zip(batch.input_ids, batch.attention_mask, strict=True)]


def test_nan_on_padding_reaches_no_loss() -> None:
    model = Everything()
    step = ThdStep(model, slots=SlotRule(multiple=4))
    inputs = step.inputs(texts(3, 5, 2))
    losses = model(**inputs.arguments).masked_fill(inputs.row.moe_padding_mask, float("nan"))
    assert torch.equal(step.result(losses, inputs).loss, step(texts(3, 5, 2)).loss)


@pytest.mark.parametrize("layout", ["mirrored", "contiguous"])
def test_parts_of_ranks_add_up_to_the_row(layout: Any) -> None:
    model, batch = Everything(), replace(texts(7, 11, 3), loss_weights=torch.rand(3, 11))
    rule = SlotRule.for_parallel(context=2, layout="mirrored")
    whole = ThdStep(model, slots=rule)(batch)
    parts = []
    for rank in range(2):
        step = ThdStep(model, slots=rule, context_ranks=2, context_rank=rank, layout=layout)
        parts.append(step(batch))
        assert model.called["cu_seqlens_q"].tolist() == [0, 7, 18, 21]  # of the whole row
        assert model.called["input_ids"].shape[1] == whole.segments.total // 2
        given = step.inputs(batch).row
        cuts_itself = ThdStep(model, slots=rule, context_ranks=2, context_rank=rank, layout=layout, model_cuts=True)
        inputs = cuts_itself.inputs(batch)
        assert inputs.part is not None
        assert torch.equal(inputs.arguments["tokens"], given.input_ids)
        losses = inputs.part.partition.cut(model(**inputs.arguments), rank)
        assert torch.equal(cuts_itself.result(losses, inputs).sample_loss_sums, parts[-1].sample_loss_sums)
    for name in ("loss", "loss_sum", "sample_loss_sums", "target_logprobs"):
        torch.testing.assert_close(vars(parts[0])[name] + vars(parts[1])[name], vars(whole)[name], **CLOSE)
    assert torch.equal(parts[0].sample_targets, whole.sample_targets)
    assert all(part.work.physical_tokens == whole.segments.total // 2 for part in parts)


def test_a_part_is_rolled_with_its_halo() -> None:
    model, batch = Everything(), texts(7, 11, 3)
    rule = SlotRule.for_parallel(context=2, layout="mirrored")
    for rank in range(2):
        inputs = ThdStep(model, slots=rule, context_ranks=2, context_rank=rank).inputs(batch)
        row, part, halo = inputs.row, inputs.part, inputs.halo(2)
        assert part is not None
        came = row.input_ids[:, halo.places(rank)]
        expected = part.partition.cut(roll_left(row.input_ids, row.segments, depth=2, fill=0), rank)
        assert torch.equal(halo.roll_left(part.input_ids, came, rank, depth=2, fill=0), expected)
    with pytest.raises(ConfigError, match="there is no halo"):
        ThdStep(model).inputs(batch).halo(1)


def test_router_losses_leave_padding_out() -> None:
    segments = Segments.from_lengths([5, 3, 9], SlotRule(multiple=4))
    logits = [torch.randn(1, segments.total, 6) for _ in range(3)]
    padding = segments.padding_mask()[None]
    real = tuple(layer[~padding] for layer in logits)
    poisoned = [layer.masked_fill(padding[..., None], 1e4) for layer in logits]
    losses = masked_router_losses(poisoned, padding, top_k=2)
    torch.testing.assert_close(losses.aux_loss, load_balancing_loss_func(real, 6, 2))
    torch.testing.assert_close(losses.z_loss, torch.cat(real).logsumexp(-1).square().mean())
    assert losses.expert_counts.sum(1).tolist() == [2 * 17] * 3
    nothing = masked_router_losses(poisoned, torch.ones_like(padding), top_k=2)
    assert nothing.aux_loss == nothing.z_loss == 0


# ---------------------------------------------------------------------- what is refused


def ignores(input_ids: Any, labels: Any, **kwargs: Any) -> Any: ...


def no_positions(input_ids: Any, cu_seqlens_q: Any) -> Any: ...


def needs_more(input_ids: Any, cu_seqlens_q: Any, position_ids: Any, rewards: Any) -> Any: ...


def scalar(input_ids: torch.Tensor, packed_seq_params: Any) -> torch.Tensor:
    return input_ids.float().mean()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ThdStep(ignores), "names none of .*cu_seqlens_q.*kwargs do not count"),
        (lambda: ThdStep(no_positions), "none of .*position_ids.*run on from sample to sample"),
        (lambda: ThdStep(Plain(), slots=SlotRule(multiple=4)), "neither cu_seqlens_q_padded nor packed_seq_params"),
        (lambda: ThdStep(Weighted(num_moe_experts=4), slots=SlotRule(multiple=4)), "routers would count padding"),
        (lambda: ThdStep(Plain())(pack(texts(3, 5), rule=SlotRule(multiple=4))), "the row has 4 tokens of padding"),
        (lambda: ThdStep(needs_more)(texts(3, 5)), "needs rewards, which this row does not have"),
        (lambda: ThdStep(Plain())(texts(3, 5), temperatur=1.0), "takes no temperatur"),
        (lambda: ThdStep(scalar)(texts(3, 5)), r"returned \[\] for a row of 8 tokens"),
        (
            lambda: ThdStep(Plain(), context_ranks=2, context_rank=2),
            "context_rank must be a whole .* from 0 to 1, got 2",
        ),
        (lambda: ThdStep(Plain())([1, 2]), "a list is no batch"),
    ],
)
def test_a_model_that_would_lose_something_is_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_a_model_that_finds_padding_by_itself_may_say_so() -> None:
    ThdStep(Weighted(num_moe_experts=4), slots=SlotRule(multiple=4), has_experts=False)
    ThdStep(Weighted(num_moe_experts=4))  # nothing to count


def test_media_that_the_model_does_not_take_are_refused(reference: Any, samples: list[Any]) -> None:
    with pytest.raises(ConfigError, match="image_grid_thw, pixel_values, which the model's forward does not take"):
        ThdStep(Plain(vocabulary=512), config=reference.config)(padded(samples))


def test_rows_that_the_ranks_cannot_share_are_refused() -> None:
    step = ThdStep(Everything(), slots=SlotRule(multiple=4))
    with pytest.raises(LayoutError, match=r"segment 0 has a slot of 3 tokens.*pack it with SlotRule\(multiple=4\)"):
        step(pack(texts(3, 5)))
    with pytest.raises(LayoutError, match=r"it is 8 tokens wide: pack it with SlotRule\(row_multiple=16\)"):
        ThdStep(Everything(), slots=SlotRule(row_multiple=16))(pack(texts(3, 5)))


def test_other_tensors_of_a_dictionary_reach_a_model_that_names_them() -> None:
    model, batch = Weighted(), texts(3, 5)
    weight = torch.ones(2)
    ThdStep(model)({**batch.to_hf(), "weight": weight})
    assert torch.equal(model.called["weight"], weight)
    assert model.called["position_ids"].tolist() == [[0, 1, 2, 0, 1, 2, 3, 4]]
    by_token = torch.arange(10.0).view(2, 5)
    ThdStep(model)({**batch.to_hf(), "weight": by_token})
    assert model.called["weight"].tolist() == [[0, 1, 2, 5, 6, 7, 8, 9]]


def test_a_whole_thd_dictionary_is_a_row() -> None:
    model, row = Everything(), pack(texts(3, 5), rule=SlotRule(multiple=4)).to_hf()
    both = {"cu_seqlens_kv": row["cu_seqlens_q"], "cu_seqlens_kv_padded": row["cu_seqlens_q_padded"], "max_seqlen_q": 8}
    step = ThdStep(model, slots=SlotRule(multiple=4))
    assert torch.equal(step({**row, **both}).loss, step(row).loss)
    assert model.called["position_ids"].tolist() == [[0, 1, 2, 0, 0, 1, 2, 3, 4, 0, 0, 0]]


def test_restarts_of_a_dictionary_are_checked_as_those_of_a_call() -> None:
    step, batch = ThdStep(Everything()), texts(3, 5).to_hf()
    assert step.inputs({**batch, "rope_cu_seqlens": torch.tensor([0, 3, 5, 8])}).arguments["position_ids"][0, 5] == 0
    with pytest.raises(LayoutError, match="has no boundary where sample 1 starts"):
        step.inputs({**batch, "rope_cu_seqlens": torch.tensor([0, 2, 8])})


MASK = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])


@pytest.mark.parametrize(
    ("name", "value", "error", "message"),
    [
        ("padding_mask", MASK == 1, LayoutError, "padding_mask .True on padding. does not fit the attention_mask"),
        ("loss_mask", MASK, ConfigError, "set labels to -100"),
        ("weights", torch.ones(2), ConfigError, "takes no weights"),
        ("weights", torch.ones(2, 5), ConfigError, "takes no weights"),
        ("input_ids", torch.ones(2, 5), LayoutError, "must hold whole numbers"),
    ],
)
def test_a_dictionary_that_would_be_misread_is_refused(name: str, value: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        ThdStep(Weighted())({**texts(3, 5).to_hf(), name: value})


@pytest.mark.parametrize("pixels", [None, slice(0, -4)], ids=["none", "too few"])
def test_pixels_that_are_not_those_of_the_grids_are_refused(reference: Any, samples: list[Any], pixels: Any) -> None:
    batch = padded(samples).to_hf()
    batch["pixel_values"] = None if pixels is None else batch["pixel_values"][pixels]
    for config in (None, reference.config):
        with pytest.raises(
            LayoutError, match=r"has image_grid_thw and no pixel_values|not what image_grid_thw describes"
        ):
            ThdStep(takes_media, config=config)(batch)


def test_positions_of_media_need_a_configuration(samples: list[Any]) -> None:
    with pytest.raises(ConfigError, match="give the step config="):
        ThdStep(takes_media)(padded(samples))


def test_a_loss_mask_of_other_targets_is_refused() -> None:
    step = ThdStep(Plain())
    inputs = step.inputs(texts(3, 5))
    losses = torch.zeros(1, 8)
    with pytest.raises(LayoutError, match="the loss mask that the model returned"):
        step.result((losses, torch.ones(1, 8)), inputs)
