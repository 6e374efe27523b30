"""OpenAI's endpoints through its own client; the oracle is the unmodified model with its processor and template."""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import torch
from PIL import Image
from service.test_server import KEY, NAME, TEXT, WAIT, Running, pytestmark, serving, tinker
from step_service import png

from vlmpack.service import ServiceLimits

assert pytestmark  # those of the client
URL = f"data:image/png;base64,{base64.b64encode(png(64, 64)).decode()}"


@pytest.fixture(name="running", scope="module")
def _running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with serving(tmp_path_factory.mktemp("service"), ServiceLimits()) as running:
        yield running


@pytest.fixture(name="client", scope="module")
def _client(running: Running) -> Iterator[Any]:
    openai = pytest.importorskip("openai", reason="needs OpenAI's client: pip install openai")
    with openai.OpenAI(base_url=f"{running.address}/v1", api_key=KEY, max_retries=0, timeout=WAIT) as client:
        yield client


def completed(client: Any, **body: Any) -> dict[str, Any]:
    """A completion as the client reads it."""
    return client.completions.create(**{"model": NAME, **body}).model_dump()


def generated(running: Running, count: int, **inputs: Any) -> tuple[list[int], torch.Tensor]:
    """Ids that `generate` chooses greedily after an input, and the log-probabilities of every id in their places."""
    config = running.plain.config
    with torch.no_grad():
        ids = running.plain.generate(
            **inputs,
            max_new_tokens=count,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            suppress_tokens=[config.image_token_id, config.video_token_id],
        )
        new = ids[0, inputs["input_ids"].shape[1] :]
        types = {"mm_token_type_ids": (ids == config.image_token_id).long()} if "pixel_values" in inputs else {}
        more = {name: inputs[name] for name in ("pixel_values", "image_grid_thw") if name in inputs}
        logits = running.plain(input_ids=ids, **types, **more).logits[0, -count - 1 : -1]
    return new.tolist(), logits.log_softmax(-1)


def test_a_completion_is_what_the_model_generates(running: Running, client: Any) -> None:
    tokenizer = running.base.processor.tokenizer
    new, logprobs = generated(running, 5, input_ids=torch.tensor([TEXT]))
    answer = completed(client, prompt=TEXT, max_tokens=5, temperature=0, logprobs=2)
    (choice,) = answer["choices"]
    assert [answer["usage"][f"{name}_tokens"] for name in ("prompt", "completion", "total")] == [6, 5, 11]
    assert choice["finish_reason"] == "length"
    assert choice["text"] == tokenizer.decode(new, skip_special_tokens=True)
    assert choice["logprobs"]["tokens"] == [tokenizer.decode([token]) for token in new]
    chosen = logprobs.gather(1, torch.tensor(new)[:, None])[:, 0]
    assert choice["logprobs"]["token_logprobs"] == pytest.approx(chosen.tolist(), abs=1e-4)
    assert max(choice["logprobs"]["top_logprobs"][0].values()) == pytest.approx(float(logprobs[0].max()), abs=1e-4)


def test_a_prompt_is_scored_by_an_echo_of_it(running: Running, client: Any) -> None:
    """As evaluation harnesses compare continuations."""
    with torch.no_grad():
        logprobs = running.plain(input_ids=torch.tensor([TEXT])).logits[0, :-1].log_softmax(-1)
    body = {"prompt": [TEXT, TEXT[:3]], "max_tokens": 0, "echo": True, "logprobs": 1}
    first, second = completed(client, **body)["choices"]
    expected = logprobs.gather(1, torch.tensor(TEXT[1:])[:, None])[:, 0].tolist()
    for choice, count in ((first, 6), (second, 3)):
        found = choice["logprobs"]
        assert found["token_logprobs"][0] is None and found["top_logprobs"][0] is None
        assert found["token_logprobs"][1:] == pytest.approx(expected[: count - 1], abs=1e-4)
        assert "".join(found["tokens"]) == choice["text"] == running.base.processor.tokenizer.decode(TEXT[:count])


def test_a_chat_with_an_image_is_what_the_model_generates_after_its_template(running: Running, client: Any) -> None:
    content: list[Any] = [{"type": "text", "text": "what"}, {"type": "image"}, {"type": "text", "text": "is it"}]
    processor = running.base.processor
    text = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    inputs = processor(text=[text], images=[Image.open(io.BytesIO(png(64, 64)))], return_tensors="pt")
    new, logprobs = generated(running, 4, **inputs)
    content[1] = {"type": "image_url", "image_url": {"url": URL}}
    messages = [{"role": "user", "content": content}]
    chat: Any = {"model": NAME, "messages": messages, "max_completion_tokens": 4, "temperature": 0, "top_logprobs": 1}
    answer = client.chat.completions.create(**chat, logprobs=True).model_dump()
    (choice,) = answer["choices"]
    assert answer["usage"]["prompt_tokens"] == inputs["input_ids"].shape[1]
    assert choice["message"]["content"] == processor.tokenizer.decode(new, skip_special_tokens=True)
    for at, entry in enumerate(choice["logprobs"]["content"]):
        assert entry["logprob"] == pytest.approx(float(logprobs[at, new[at]]), abs=1e-4)
        assert entry["top_logprobs"][0]["logprob"] == pytest.approx(float(logprobs[at].max()), abs=1e-4)
    chunks = list(client.chat.completions.create(**chat, stream=True, stream_options={"include_usage": True}))
    begin, end, usage = (chunk.model_dump() for chunk in chunks)
    assert begin["choices"][0]["delta"]["content"] == choice["message"]["content"]
    assert (end["choices"][0]["delta"]["content"], end["choices"][0]["finish_reason"]) == (None, "length")
    assert usage["usage"] == answer["usage"]


def test_choices_are_seeded_and_end_before_a_stop(client: Any) -> None:
    body = {"prompt": "abc", "n": 2, "seed": 3, "max_tokens": 12, "temperature": None, "top_p": None}
    first, again = (completed(client, **body)["choices"] for _ in range(2))
    assert first == again and first[0]["text"] != first[1]["text"]
    text = first[0]["text"]
    stopped = completed(client, **body, stop=["never this", text[5:8]], logprobs=0)["choices"][0]
    assert (stopped["text"], stopped["finish_reason"]) == (text[: text.index(text[5:8])], "stop")
    assert "".join(stopped["logprobs"]["tokens"]).startswith(stopped["text"])


def test_a_checkpoint_is_a_model(running: Running, client: Any) -> None:
    trainer = tinker.ServiceClient(base_url=running.address, api_key=KEY)
    model = trainer.create_lora_training_client(base_model=NAME, rank=4, seed=1).result(WAIT)
    path = model.save_weights_for_sampler("named").result(WAIT).path
    assert [each.id for each in client.models.list()] == [NAME, path]
    texts = [completed(client, model=name, prompt=TEXT, temperature=0)["choices"] for name in (NAME, path)]
    assert texts[0] == texts[1]  # nothing was trained
    trainer.create_rest_client().delete_checkpoint_from_tinker_path(path).result(WAIT)
    with pytest.raises(Exception, match="404") as refused:
        completed(client, model=path, prompt=TEXT)
    assert type(refused.value).__name__ == "NotFoundError"
    trainer.close("success").result(WAIT)


def saying(**message: Any) -> dict[str, Any]:
    """A chat of one message."""
    return {"messages": [{"role": "user", **message}]}


REMOTE = {"type": "image_url", "image_url": {"url": "http://a/b.png"}}


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("completions", {"prompt": "a", "frequency_penalty": 0.5}, "frequency_penalty 0.5.*does not have it; "),
        ("completions", {"prompt": "a", "best_of": 2}, "best_of 2.*send n"),
        ("completions", {"prompt": "a", "min_p": 0.5}, "min_p: .* no such setting"),
        ("completions", {"prompt": [20, -1]}, "-1"),
        ("completions", {"prompt": {"a": 1}}, "prompt: .*a list"),
        ("completions", {"prompt": ["a"] * 3000}, "3,000 prompts, n 1: .* at most 1,024 are served"),
        ("completions", {}, "prompt: absent"),
        ("completions", {"prompt": "a", "stop": [""]}, "stop: .* an empty text"),
        ("completions", {"prompt": "a", "model": "gpt"}, "model 'gpt': this service has"),
        ("chat/completions", {**saying(content="a"), "tools": [{}]}, "tools .*system message"),
        ("chat/completions", {"messages": []}, "messages: none"),
        ("chat/completions", saying(), r"messages\[0\].content: absent"),
        ("chat/completions", saying(content=[REMOTE]), "nothing is fetched here: send data:"),
        ("chat/completions", saying(content="<|image_pad|>"), "0 images, but 1 times"),
        ("chat/completions", saying(content="a", name="b"), r"\[0\].name: .* no such setting"),
    ],
)
def test_what_is_not_served_is_refused_by_name(running: Running, path: str, body: dict[str, Any], message: str) -> None:
    headers = {"Authorization": f"Bearer {KEY}"}
    answer = httpx.post(f"{running.address}/v1/{path}", json={"model": NAME, **body}, headers=headers, timeout=WAIT)
    assert answer.status_code in (400, 404)
    assert re.search(message, answer.json()["error"]["message"])
