"""Binary messages, against bytes captured from the client and against the client's own messages."""

from __future__ import annotations

import base64
import re
from pathlib import Path

import numpy as np
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto

from vlmpack.errors import RequestError
from vlmpack.service.wire import codec, messages, schema_pb2

REQUEST = base64.b64decode(
    "ChVzNzdjYzFiNDUwYmFiOnRyYWluOjAQAxpkChAKDgoMFAAAABUAAAAWAAAAEh4KB3dlaWdodHMSEwoMAAAAAAAAgD8AAIA/GAEiAQMSMAoN"
    "dGFyZ2V0X3Rva2VucxIfChgVAAAAAAAAABYAAAAAAAAAFwAAAAAAAAAYAiIBAyINY3Jvc3NfZW50cm9weTAB"
)
"""`forward` of one datum: model s77cc1b450bab:train:0, number 3, tokens 20 21 22, targets 21 22 23, weights 0 1 1."""


def request(**fields: object) -> object:
    """A message of the schema."""
    return schema_pb2.ForwardBackwardRequest(**{"model_id": "s:train:0", "seq_id": 1, **fields})


def with_tensor(**fields: object) -> bytes:
    message = request()
    datum = message.data.add()  # pyright: ignore
    datum.model_input.add().encoded_text.tokens = np.array([1, 2], "<i4").tobytes()
    tensor = datum.loss_fn_inputs.add(key="weights").value
    tensor.MergeFrom(schema_pb2.Tensor(**fields))
    return message.SerializeToString()  # pyright: ignore


def test_the_generated_module_is_that_of_the_schema() -> None:
    file = FileDescriptorProto()
    schema_pb2.DESCRIPTOR.CopyToProto(file)
    generated = [
        (
            message.name,
            "repeated " * (field.label == field.LABEL_REPEATED) + "optional " * field.proto3_optional,
            field.type_name.rpartition(".")[2] or field.Type.Name(field.type)[5:].lower(),
            field.name,
            str(field.number),
        )
        for message in file.message_type
        for field in message.field
    ]
    text = Path(schema_pb2.__file__).with_name("schema.proto").read_text()
    declared = [
        (message, *field)
        for message, body in re.findall(r"^message (\w+) \{(.*?)^\}", text, re.DOTALL | re.MULTILINE)
        for field in re.findall(r"(repeated |optional )?(\w+) (\w+) = (\d+);", body)
    ]
    assert len(declared) == 61
    assert generated == declared


# ---------------------------------------------------------------------- what the client sends


def test_the_clients_own_messages_are_read() -> None:
    tinker = pytest.importorskip("tinker", reason="the client needs Python 3.11")
    from tinker.proto.request_conv import forward_backward_request_to_proto
    from tinker.types.forward_backward_input import ForwardBackwardInput
    from tinker.types.forward_backward_request import ForwardBackwardRequest

    types = tinker.types
    chunks = [
        types.EncodedTextChunk(tokens=[5, 6]),
        types.ImageChunk(data=b"not looked at", format="png", expected_tokens=4),
        types.ImageChunk(data=b"nor this", format="jpeg"),
        types.EncodedTextChunk(tokens=[7]),
    ]
    inputs = {
        "target_tokens": types.TensorData.from_numpy(np.arange(8)),
        "weights": types.TensorData.from_numpy(np.ones(8, np.float32)),
    }
    datum = types.Datum(model_input=types.ModelInput(chunks=chunks), loss_fn_inputs=inputs)
    sent = ForwardBackwardRequest(
        forward_backward_input=ForwardBackwardInput(
            data=[datum, datum], loss_fn="ppo", loss_fn_config={"clip_low_threshold": 0.5}
        ),
        model_id="s:train:7",
        seq_id=12,
    )
    read = codec.decode_forward_backward(forward_backward_request_to_proto(sent).SerializeToString())
    assert (read.model_id, read.seq_id, len(read.data)) == ("s:train:7", 12, 2)
    assert read.loss_config == {"clip_low_threshold": 0.5}
    first, png, jpeg, last = read.data[1].chunks
    assert isinstance(first, messages.TextChunk) and first.tokens.tolist() == [5, 6]
    assert png == messages.ImageChunk(data=b"not looked at", format="png", expected_tokens=4)
    assert jpeg == messages.ImageChunk(data=b"nor this", format="jpeg", expected_tokens=None)
    assert isinstance(last, messages.TextChunk) and last.tokens.tolist() == [7]
    assert read.data[1].inputs["target_tokens"].tolist() == list(range(8))


def test_the_client_reads_results() -> None:
    pytest.importorskip("tinker", reason="the client needs Python 3.11")
    from tinker.proto.response_conv import deserialize_forward_backward_output, deserialize_sample_response

    logprobs = (np.array([-1.5], np.float32), np.array([[-2.0, -0.25], [-1.0, 0.0]], np.float32))
    result = messages.ForwardBackwardResult(logprobs=logprobs, metrics={"loss:sum": 3.75, "tokens:sum": 4.0})
    output = deserialize_forward_backward_output(codec.encode_result(result))
    assert [entry["logprobs"].tolist() for entry in output.loss_fn_outputs] == [[-1.5], [[-2.0, -0.25], [-1.0, 0.0]]]
    assert output.metrics == {"loss:sum": 3.75, "tokens:sum": 4.0}

    sequences = (
        messages.SampledSequence(
            tokens=np.array([4, 1]),
            logprobs=np.array([-0.5, -1]),
            stop_reason="stop",
            top=messages.TopTokens(ids=np.array([[4], [2]]), logprobs=np.array([[-0.5], [-0.25]])),
        ),
        messages.SampledSequence(tokens=np.array([], np.int32), logprobs=np.array([]), stop_reason="length"),
    )
    scores = messages.PromptScores(
        logprobs=np.array([np.nan, -3], np.float32),
        top=messages.TopTokens(ids=np.array([[0, 0], [7, 8]]), logprobs=np.array([[np.nan, np.nan], [-0.5, -1.5]])),
        targets=messages.SparseMatrix(keys=np.array([1]), values=np.array([-2.5]), shape=(1, 3)),
        drawn=messages.TopTokens(ids=np.array([[9, 9]]), logprobs=np.array([[-4.0, -4.0]])),
    )
    sampled = messages.SampleResult(sequences=sequences, scores=scores)
    response = deserialize_sample_response(codec.encode_result(sampled))
    assert [sequence.tokens for sequence in response.sequences] == [[4, 1], []]
    assert [sequence.stop_reason for sequence in response.sequences] == ["stop", "length"]
    assert response.prompt_logprobs == [None, -3.0]
    assert response.topk_prompt_logprobs == [None, [(7, -0.5), (8, -1.5)]]
    assert [sequence.topk_logprobs for sequence in response.sequences] == [[[(4, -0.5)], [(2, -0.25)]], None]
    targets, drawn = response.target_prompt_logprobs, response.prompt_alt_tokens
    assert (targets.shape, targets.sparse_col_indices, targets.data) == ([1, 3], [1], [-2.5])
    assert (drawn.tokens.tolist(), drawn.logprobs.tolist()) == ([[9, 9]], [[-4.0, -4.0]])


# ---------------------------------------------------------------------- tensors and settings


def test_bfloat16_becomes_float32_and_a_tensor_without_a_shape_has_one_dimension() -> None:
    body = with_tensor(dense=np.array([0x3F80, 0xC000], "<u2").tobytes(), dtype=schema_pb2.BFLOAT16, shape=[2])
    assert codec.decode_forward_backward(body).data[0].inputs["weights"].tolist() == [1.0, -2.0]
    body = with_tensor(dense=np.ones(2, "<f4").tobytes(), dtype=schema_pb2.FLOAT32)
    assert codec.decode_forward_backward(body).data[0].inputs["weights"].shape == (2,)


def test_of_an_entry_sent_twice_the_last_counts_and_settings_of_version_2_go_first() -> None:
    message = request()
    for value in (1.0, 2.0):
        message.loss_fn_config.add(key="beta", value=value)  # pyright: ignore
    assert codec.decode_forward_backward(message.SerializeToString()).loss_config == {"beta": 2.0}  # pyright: ignore
    message.loss_fn_config_v2.add(key="beta").value.number = 3.0  # pyright: ignore
    message.loss_fn_config_v2.add(key="kind").value.text = "soft"  # pyright: ignore
    read = codec.decode_forward_backward(message.SerializeToString())  # pyright: ignore
    assert read.loss_config == {"beta": 3.0, "kind": "soft"}


def csr(ends: list[int], columns: list[int]) -> dict[str, bytes]:
    values = np.ones(len(columns), "<f4").tobytes()
    numbers = (np.array(each, "<i8").tobytes() for each in (ends, columns))
    return {"values": values, **dict(zip(("crow_indices", "col_indices"), numbers, strict=True))}


ONE_FLOAT = np.ones(1, "<f4").tobytes()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dense": b"123", "dtype": 1, "shape": [1]}, "datum 0: weights: 3 bytes are no whole number of float32"),
        ({"dense": ONE_FLOAT, "dtype": 1, "shape": [2]}, r"datum 0: weights: 1 numbers, but shape \[2\]"),
        ({"dense": ONE_FLOAT, "dtype": 1, "shape": [-1, -1]}, r"shape \[-1, -1\]"),
        ({"dense": ONE_FLOAT, "dtype": 0, "shape": [1]}, "dtype 0; send float32 or int64"),
        ({"dense": ONE_FLOAT, "dtype": 77, "shape": [1]}, "dtype 77"),
        ({"dense": ONE_FLOAT, "dtype": 1, "shape": [2**62] * 99}, "datum 0: weights: a shape of 99 dimensions"),
        ({"sparse_csr": {"values": b""}, "dtype": 1}, "datum 0: weights: a sparse matrix of shape"),
        ({"sparse_csr": csr([], []), "dtype": 1, "shape": [-1, 3]}, "with other counts of entries"),
        ({"sparse_csr": csr([0, 1, 0], [0]), "dtype": 1, "shape": [2, 3]}, "with other counts of entries"),
        ({"sparse_csr": csr([0, 1, 3], [0]), "dtype": 1, "shape": [2, 3]}, "with other counts of entries"),
        ({"sparse_csr": csr([0, 1], [3]), "dtype": 1, "shape": [1, 3]}, "columns of a sparse matrix that are outside"),
        ({"sparse_csr": csr([0, 2], [1, 1]), "dtype": 1, "shape": [1, 3]}, "twice there, or not in order"),
    ],
)
def test_a_tensor_that_cannot_be_is_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        codec.decode_forward_backward(with_tensor(**fields))


@pytest.mark.parametrize(
    ("chunk", "message"),
    [
        ({"dmel": {"dmel": b"sound"}}, "datum 1: a dmel chunk"),
        ({}, "datum 1: a chunk of an unknown kind"),
        ({"encoded_text": {"tokens": b"12345"}}, "datum 1: tokens: 5 bytes"),
        ({"image": {"data": b"x", "dimensions": b""}}, "datum 1: an image with override_dimensions"),
    ],
)
def test_a_chunk_that_cannot_be_is_refused(chunk: dict[str, object], message: str) -> None:
    body = request(data=[{}, {"model_input": [chunk]}]).SerializeToString()  # pyright: ignore
    with pytest.raises(RequestError, match=message):
        codec.decode_forward_backward(body)


# ---------------------------------------------------------------------- names and sizes


def test_the_name_of_a_request_is_read_before_the_rest() -> None:
    assert codec.training_owner(REQUEST[:40] + b"\xff" * 30) == ("s77cc1b450bab:train:0", 3)


NO_NUMBERS = (b"\x00", b"\xff" * 9 + b"\x01", b"\x80\x80\x80\x80\x08")  # 0, -1, 2**31


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"\x0a", b"\x0a\x05ab", b"\xff" * 20, b"\x10\x03", b"\x0b\x0c", b"\x00"),
        *(b"\x0a\x01m\x10" + number for number in NO_NUMBERS),
    ],
)
def test_a_body_without_a_name_and_a_number_from_1_is_refused(body: bytes) -> None:
    with pytest.raises(RequestError):
        codec.training_owner(body)


@pytest.mark.parametrize(
    "body",
    [
        REQUEST + b"\x1a\x00" * 101,  # datums of two bytes
        REQUEST + b"\x1a\x7e" + b"\x0a\x00" * 63 + b"\x1a\x7e" + b"\x0a\x00" * 63,  # chunks of two bytes
        REQUEST + b"\x78\x00" * 101,  # fields that nobody knows
    ],
)
def test_many_empty_messages_are_refused_before_they_are_built(body: bytes) -> None:
    with pytest.raises(RequestError, match="more than 100 fields"):
        codec.check_fields(body, most=100)
    codec.check_fields(REQUEST, most=100)


def test_a_shape_of_many_dimensions_is_refused_before_it_is_built() -> None:
    body = with_tensor(dense=b"", dtype=1, shape=[0] * 101)
    with pytest.raises(RequestError, match="shape of many dimensions"):
        codec.check_fields(body, most=10_000)
