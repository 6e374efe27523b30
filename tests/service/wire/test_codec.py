"""JSON bodies to requests, outcomes to bodies."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from vlmpack.errors import RequestError
from vlmpack.service.wire import codec, messages

MODEL = "s77cc1b450bab:train:0"
ADAM = {"learning_rate": 0.001, "beta1": 0.9, "beta2": 0.95, "eps": 1e-12, "weight_decay": 0.0, "grad_clip_norm": 1.0}
SAMPLE = {
    "num_samples": 2,
    "prompt": {
        "chunks": [
            {"tokens": [20, 21, 809], "type": "encoded_text"},
            {"data": base64.b64encode(b"png").decode(), "format": "png", "expected_tokens": 4, "type": "image"},
            {"tokens": [810, 22, 23], "type": "encoded_text"},
        ]
    },
    "sampling_params": {"max_tokens": 4, "seed": 7, "stop": [5], "temperature": 1.0, "top_k": -1, "top_p": 1.0},
    "sampling_session_id": "s77cc1b450bab:sample:0",
    "seq_id": 0,
    "prompt_logprobs": False,
    "topk_prompt_logprobs": 0,
    "topk_sample_logprobs": 0,
    "prompt_alt_tokens_k": 0,
    "record_stability_info": False,
    "type": "sample",
}
"""As captured from the client."""


def decode(kind: str, /, **fields: Any) -> Any:
    return codec.decode(kind, json.dumps(fields).encode())


def sample(**changes: Any) -> Any:
    return decode("Sample", **{**SAMPLE, **changes})


def sampling(**params: Any) -> messages.SamplingParams:
    return sample(sampling_params=params).params


# ---------------------------------------------------------------------- what the client sends


def test_snapshots_have_a_name_or_belong_to_a_session() -> None:
    named = decode("SaveForSampler", model_id=MODEL, path="s1", kind="snapshot", seq_id=7)
    assert named == messages.SaveForSampler(model_id=MODEL, seq_id=7, name="s1")
    ephemeral = decode("SaveForSampler", model_id=MODEL, sampling_session_seq_id=0, kind="inflight", seq_id=8)
    assert ephemeral == messages.SaveForSampler(model_id=MODEL, seq_id=8, sampling_session_seq_id=0, kind="inflight")
    with pytest.raises(RequestError, match="neither path nor sampling_session_seq_id"):
        decode("SaveForSampler", model_id=MODEL, seq_id=8)


def test_new_models() -> None:
    lora = {"rank": 8, "seed": 1, "train_unembed": True, "train_mlp": False, "train_attn": True}
    fields = {"session_id": "s", "model_seq_id": 0, "base_model": "b", "optimizer_config": {"type": "adamw"}}
    model = decode("CreateModel", **fields, lora_config=lora, user_metadata={"n": 3, "t": "x"})
    notes = {"n": "3", "t": "x"}
    assert model == messages.CreateModel(
        session_id="s", model_seq_id=0, base_model="b", lora=messages.LoraConfig(**lora), user_metadata=notes
    )
    assert decode("CreateModel", **fields).lora is None
    assert decode("CreateModel", **fields, lora_config={"rank": 8}).lora == messages.LoraConfig(rank=8)


def test_a_prompt() -> None:
    request = sample()
    assert isinstance(request, messages.Sample)
    first, image, last = request.prompt
    assert isinstance(first, messages.TextChunk) and first.tokens.tolist() == [20, 21, 809]
    assert image == messages.ImageChunk(data=b"png", format="png", expected_tokens=4)
    assert isinstance(last, messages.TextChunk) and last.tokens.tolist() == [810, 22, 23]
    assert request.params == messages.SamplingParams(max_tokens=4, seed=7, stop=(5,))
    assert (request.num_samples, request.seq_id, request.prompt_logprobs) == (2, 0, False)
    assert sample(seq_id=3 * 10**9).seq_id == 3 * 10**9  # clones of a client start there


def test_stops() -> None:
    assert sampling().stop is None
    for sent, stop in ((None, None), ([], ()), ([3, 4], (3, 4)), ("end", ("end",)), (["a", "b"], ("a", "b"))):
        assert sampling(stop=sent).stop == stop


# ---------------------------------------------------------------------- what is refused


REFUSED: dict[str, list[tuple[Any, str]]] = {
    "adam": [
        ({"learning_rate": None}, "adam_params.learning_rate: None; .*NaN and infinity arrive as null"),
        ({"eps": None}, "adam_params.eps: None"),
        ({"learning_rate": "0.1"}, "adam_params.learning_rate: '0.1'; Input should be a valid number"),
        ({"learning_rate": 10**400}, "adam_params.learning_rate: 1000.*a valid number"),
        ({"learning_rate": True}, "adam_params.learning_rate: True; Input should be a valid number"),
        ({"learning_rate": -1}, "adam_params.learning_rate: -1; .* greater than or equal to 0"),
        ({"beta2": 1.0}, "adam_params.beta2: 1.0; .* less than 1"),
        ({"eps": 1e-60}, "adam_params.eps: 1e-60; .* greater than"),
        ({"nesterov": 1}, "adam_params.nesterov: 1; this service has no such setting"),
    ],
    "lora": [
        ({"rank": -1}, "lora_config.rank: -1; .* greater than or equal to 0"),
        ({"rank": 2.5}, "lora_config.rank: 2.5"),
        ({"rank": True}, "lora_config.rank: True"),
        ({"rank": 8, "alpha": 16}, "lora_config.alpha: 16; this service has no such setting"),
        ({"rank": 0, "train_mlp": False}, "rank 0 trains all weights; leave train_unembed"),
        ({"rank": 8, "seed": 2**63}, "lora_config.seed"),
        ({"rank": 8, "train_mlp": "no"}, "lora_config.train_mlp: 'no'; Input should be a valid boolean"),
        ([8], r"lora_config: \[8\]; an object"),
    ],
    "sampling": [
        ({"temperature": -0.1}, "temperature: -0.1; .* greater than or equal to 0"),
        ({"top_p": 0}, "top_p: 0; .* greater than 0"),
        ({"top_p": 1.5}, "top_p: 1.5"),
        ({"top_k": -2}, "top_k: -2"),
        ({"max_tokens": 0}, "max_tokens: 0; .* greater than or equal to 1"),
        ({"stop": [3, "a"]}, "stop: .* token ids, or texts, but not both"),
        ({"stop": [-1]}, "stop: .* token ids"),
        ({"stop": [True]}, "stop: .* token ids"),
        ({"stop": {"a": 1}}, "stop: .* a text or a list is needed"),
        ({"stop": ""}, "stop: .* an empty text"),
        ({"stop": "\ud800"}, "not JSON .*hex escape"),
        ({"min_p": 0.1}, "sampling_params.min_p: 0.1; this service has no such setting"),
    ],
    "chunk": [
        (
            {"type": "encoded_text", "tokens": [1.5]},
            r"prompt.chunks\[0\].encoded_text.tokens: .* token ids",
        ),
        ({"type": "encoded_text", "tokens": [2**31]}, r"chunks\[0\].encoded_text.tokens"),
        ({"type": "encoded_text", "tokens": [True]}, r"chunks\[0\].encoded_text.tokens"),
        ({"type": "encoded_text"}, r"chunks\[0\].encoded_text.tokens: absent or null"),
        ({"type": "image", "data": "***", "format": "png"}, r"chunks\[0\].image.data: .* not base64"),
        ({"type": "image", "data": "é", "format": "png"}, r"chunks\[0\].image.data: .* not base64"),
        ({"type": "image_asset_pointer", "location": "file:///etc/passwd", "format": "png"}, "fetches nothing"),
        ({"type": "dmel"}, r"prompt.chunks\[0\]: {'type': 'dmel'}; this service takes text and images"),
        ([], r"prompt.chunks\[0\]: \[\]; this service takes text and images"),
    ],
}
SEND = {
    "adam": lambda changes: decode("OptimStep", model_id=MODEL, seq_id=2, adam_params={**ADAM, **changes}),
    "lora": lambda lora: decode("CreateModel", session_id="s", model_seq_id=0, base_model="b", lora_config=lora),
    "sampling": lambda params: sampling(**params),
    "chunk": lambda chunk: sample(prompt={"chunks": [chunk]}),
}


@pytest.mark.parametrize(("kind", "sent", "message"), [(kind, *row) for kind, rows in REFUSED.items() for row in rows])
def test_settings_and_chunks_that_cannot_be_are_refused_by_name(kind: str, sent: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        SEND[kind](sent)


def test_numbers_that_json_does_not_have() -> None:
    for number in ("NaN", "Infinity", "-Infinity", "1e999"):
        body = f'{{"model_id": "m", "seq_id": 1, "adam_params": {{"learning_rate": {number}}}}}'
        with pytest.raises(RequestError):
            codec.decode("OptimStep", body.encode())


def test_other_optimizers() -> None:
    with pytest.raises(RequestError, match=r"dimuon.*does not have it; this service has AdamW alone"):
        decode("OptimStep", model_id=MODEL, seq_id=2, optimizer_params={"type": "dimuon"})
    fields = {"session_id": "s", "model_seq_id": 0, "base_model": "b", "optimizer_config": {"type": "dimuon"}}
    with pytest.raises(RequestError, match=r"optimizer_config.*dimuon"):
        decode("CreateModel", **fields)
    with pytest.raises(RequestError, match=r"optimizer_config.*dimuon"):
        decode("CreateFromCheckpoint", **fields, path="p", optimizer=False)


def test_ids_whose_log_probabilities_are_wanted() -> None:
    dense = sample(target_prompt_logprobs={"data": [5, -1], "dtype": "int64", "shape": [2, 1]}).target_prompt_logprobs
    assert (dense.keys.tolist(), dense.values.tolist(), dense.shape, dense.is_dense) == ([0, 1], [5, -1], (2, 1), True)
    rows = {"data": [5], "shape": [2, 3], "sparse_crow_indices": [0, 0, 1], "sparse_col_indices": [2]}
    sparse = sample(target_prompt_logprobs=rows).target_prompt_logprobs
    assert (sparse.keys.tolist(), sparse.values.tolist(), sparse.is_dense) == ([5], [5], False)
    for change in ({"data": [-2]}, {"data": [0.5]}, {"shape": [2]}, {"sparse_col_indices": [3]}, {"data": None}):
        with pytest.raises(RequestError, match="target_prompt_logprobs"):
            sample(target_prompt_logprobs=rows | change)
    with pytest.raises(RequestError, match=r"2 ids, but shape \[3, 1\]"):
        sample(target_prompt_logprobs={"data": [5, 1], "shape": [3, 1]})


BROKEN = (b"", b"{", b"[]", b"null", b"3", b'{"a": 1} x', b"\xff\xfe{}", b"\xef\xbb\xbf{}", b"[" * 100_000)


@pytest.mark.parametrize("body", [*BROKEN, b'{"a":' * 50_000, b'{"seq_id": ' + b"9" * 10_000 + b"}"])
def test_a_body_that_is_no_object_of_usable_numbers_is_refused(body: bytes) -> None:
    with pytest.raises(RequestError):
        codec.decode("OptimStep", body)


def test_one_of_many_faults_is_enough() -> None:
    for fields in ({"prompt": {"chunks": [1] * 9999}}, {"sampling_params": {str(at): 1 for at in range(9999)}}):
        with pytest.raises(RequestError) as refused:
            sample(**fields)
        assert refused.value.__cause__.error_count() == 1  # pyright: ignore


def test_notes_are_short() -> None:
    with pytest.raises(RequestError, match="more than 16384 characters"):
        decode("SaveWeights", model_id=MODEL, path="a", seq_id=5, user_metadata={"a": "b" * 20_000})
