"""The unmodified Tinker client against a running server: `python client_program.py URL KEY`.

Prints one JSON object a line: the check, whether it holds, and what was seen. The oracle is numpy, torch and the client
itself: single datums, sums by hand. Gradients are seen through one step of Adam with eps = 1e4, which is a step of
plain gradient descent, so that a wrong scale shows.
"""

from __future__ import annotations

import io
import json
import os
import random
import sys
import traceback
from collections.abc import Callable
from typing import Any

os.environ.setdefault("TINKER_TELEMETRY", "0")

import numpy as np
import tinker
from PIL import Image
from tinker import types

CLOSE = 2e-5
VISION_START, VISION_END = "<|vision_start|>", "<|vision_end|>"


class Setup:
    """A client of the server, and datums for its model."""

    def __init__(self, url: str, key: str) -> None:
        self.service = tinker.ServiceClient(base_url=url, api_key=key)
        model = self.service.get_server_capabilities().supported_models[0]
        self.name = model.model_name
        client = self.model()
        self.tokenizer = client.get_tokenizer()
        self.vocab = len(self.tokenizer)
        ids = self.tokenizer.convert_tokens_to_ids
        self.special = {*self.tokenizer.all_special_ids, *self.tokenizer.get_added_vocab().values()}
        self.before, self.after = ids(VISION_START), ids(VISION_END)
        self.plain = [i for i in range(5, self.vocab) if i not in self.special]

    def model(self, **settings: Any) -> Any:
        return self.service.create_lora_training_client(base_model=self.name, **{"rank": 4, "seed": 3, **settings})

    def image(self, seed: int, width: int = 64, height: int = 64, format: str = "png") -> types.ImageChunk:
        pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
        file = io.BytesIO()
        Image.fromarray(pixels).save(file, format.upper())
        return types.ImageChunk(data=file.getvalue(), format=format)

    def text(self, seed: int, length: int) -> list[int]:
        return random.Random(seed).choices(self.plain, k=length)

    def inputs(self, seed: int, length: int, *, image_at: int | None = None) -> types.ModelInput:
        tokens = self.text(seed, length)
        if image_at is None:
            return types.ModelInput(chunks=[types.EncodedTextChunk(tokens=tokens)])
        before, after = [*tokens[:image_at], self.before], [self.after, *tokens[image_at:]]
        size = 64 + 32 * (seed % 3)
        image = self.image(seed, size, 64)
        expected = self.count(image)
        chunk = types.ImageChunk(data=image.data, format="png", expected_tokens=expected)
        return types.ModelInput(
            chunks=[types.EncodedTextChunk(tokens=before), chunk, types.EncodedTextChunk(tokens=after)]
        )

    def count(self, image: types.ImageChunk) -> int:
        """Tokens of an image: 32 pixels a side each, as Qwen3-VL has patches of 16, merged by 2."""
        width, height = Image.open(io.BytesIO(image.data)).size
        return round(width / 32) * round(height / 32)

    def datum(self, seed: int, length: int, *, image_at: int | None = None, loss: str = "cross_entropy") -> types.Datum:
        model_input = self.inputs(seed, length, image_at=image_at)
        n = model_input.length
        draw = np.random.default_rng(seed)
        targets = draw.choice(self.plain, n).astype(np.int64)
        fields: dict[str, Any] = {"target_tokens": tensor(targets)}
        if loss == "cross_entropy":
            fields["weights"] = tensor(draw.normal(size=n).astype(np.float32))
        else:
            fields["logprobs"] = tensor((draw.normal(size=n) * 0.3 - 6).astype(np.float32))
            fields["advantages"] = tensor(draw.normal(size=n).astype(np.float32))
        return types.Datum(model_input=model_input, loss_fn_inputs=fields)

    def mixed(self, loss: str = "cross_entropy") -> list[types.Datum]:
        lengths = ((1, 12, None), (2, 5, 2), (3, 31, None), (4, 9, 9), (5, 1, None), (6, 17, 0))
        return [self.datum(seed, n, image_at=at, loss=loss) for seed, n, at in lengths]


def tensor(values: np.ndarray) -> types.TensorData:
    dtype = "int64" if values.dtype == np.int64 else "float32"
    return types.TensorData(data=values.tolist(), dtype=dtype, shape=list(values.shape))


def descend(client: Any, rate: float = 1e-2) -> Any:
    """One step of plain gradient descent."""
    adam = types.AdamParams(
        learning_rate=rate * 1e4, beta1=0.0, beta2=0.0, eps=1e4, weight_decay=0.0, grad_clip_norm=0.0
    )
    return client.optim_step(adam).result()


def logprobs(client: Any, data: list[types.Datum]) -> list[np.ndarray]:
    return of(client.forward(data, "cross_entropy").result())


def of(output: Any) -> list[np.ndarray]:
    return [np.asarray(o["logprobs"].data, np.float64) for o in output.loss_fn_outputs]


def apart(a: list[np.ndarray], b: list[np.ndarray]) -> float:
    assert [x.shape for x in a] == [x.shape for x in b]
    return max(float(np.abs(x - y).max()) for x, y in zip(a, b, strict=True))


def values(datum: types.Datum, name: str) -> np.ndarray:
    return np.asarray(datum.loss_fn_inputs[name].data, np.float64)


# ---------------------------------------------------------------------- checks


def a_batch_equals_its_datums(s: Setup) -> str:
    data, probe = s.mixed(), [s.datum(50, 20), s.datum(51, 6, image_at=3)]
    together, single = s.model(), s.model()
    assert apart(logprobs(together, probe), logprobs(single, probe)) == 0, "the same seed gives other adapters"
    batch = of(together.forward_backward(data, "cross_entropy").result())
    alone = [of(single.forward_backward([datum], "cross_entropy").result())[0] for datum in data]
    assert apart(batch, alone) < CLOSE
    before = logprobs(together, probe)
    descend(together), descend(single)
    after = logprobs(together, probe)
    moved, difference = apart(before, after), apart(after, logprobs(single, probe))
    assert moved > 1e-3, f"a step moved log-probabilities by {moved} only"
    assert difference < CLOSE + 1e-3 * moved, difference
    return f"apart {apart(batch, alone):.1e}; after a step that moved by {moved:.1e}: {difference:.1e}"


def bad_requests_leave_no_trace(s: Setup) -> str:
    client, probe = s.model(), [s.datum(50, 20)]
    good = s.datum(1, 8)
    before = logprobs(client, probe)

    def with_fields(**fields: Any) -> types.Datum:
        kept = {**good.loss_fn_inputs, **{k: v for k, v in fields.items() if v is not None}}
        kept = {k: v for k, v in kept.items() if fields.get(k, 0) is not None}
        return types.Datum(model_input=good.model_input, loss_fn_inputs=kept)

    def of_tokens(*tokens: int) -> types.Datum:
        n = len(tokens)
        fields = {"target_tokens": tensor(np.full(n, s.plain[0], np.int64)), "weights": tensor(np.ones(n, np.float32))}
        return types.Datum(model_input=types.ModelInput.from_ints(list(tokens)), loss_fn_inputs=fields)

    def of_image(data: bytes, count: int) -> types.Datum:
        image = types.ImageChunk(data=data, format="png", expected_tokens=count)
        before, after = [s.plain[0], s.before], [s.after]
        chunks = [types.EncodedTextChunk(tokens=before), image, types.EncodedTextChunk(tokens=after)]
        targets = tensor(np.full(3 + count, s.plain[0], np.int64))
        return types.Datum(model_input=types.ModelInput(chunks=chunks), loss_fn_inputs={"target_tokens": targets})

    pad = s.tokenizer.convert_tokens_to_ids("<|image_pad|>")
    weights = values(good, "weights").astype(np.float32)
    bad: list[tuple[str, list[types.Datum], str]] = [
        ("token outside", [good, of_tokens(5, 10**6)], "cross_entropy"),
        ("placeholder", [good, of_tokens(5, pad)], "cross_entropy"),
        ("fewer weights", [with_fields(weights=tensor(weights[:-1]))], "cross_entropy"),
        ("NaN weight", [good, with_fields(weights=tensor(weights * np.nan))], "cross_entropy"),
        ("no targets", [with_fields(target_tokens=None)], "cross_entropy"),
        ("no such loss", [good], "gspo"),
        ("wrong count", [good, of_image(s.image(3).data, 3)], "cross_entropy"),
        ("no image", [good, of_image(b"GIF89a not an image", 4)], "cross_entropy"),
        ("empty", [of_tokens()], "cross_entropy"),
    ]
    for what, data, name in bad:
        try:
            client.forward_backward(data, name).result()
        except tinker.RequestFailedError as error:
            assert str(error.category).lower().endswith("user"), (what, error.category)
        else:
            raise AssertionError(f"accepted: {what}")
    descend(client)
    assert apart(before, logprobs(client, probe)) == 0, "a refused request left a gradient"
    client.forward_backward([good], "cross_entropy").result()
    other = s.model()
    try:
        other.optim_step(types.AdamParams(learning_rate=float("nan"))).result()
    except tinker.RequestFailedError:
        assert apart(before, logprobs(other, probe)) == 0
    except ValueError:
        pass  # older clients refuse it themselves
    else:
        raise AssertionError("accepted: a learning rate of NaN")
    return f"{len(bad) + 1} refused, the model goes on"


def a_checkpoint_continues_the_run(s: Setup) -> str:
    data, probe = s.mixed(), [s.datum(50, 20)]
    name = f"run-{random.Random().randrange(10**9)}"

    def step(client: Any) -> None:
        client.forward_backward(data, "cross_entropy")
        client.optim_step(types.AdamParams(learning_rate=1e-3)).result()

    client = s.model()
    step(client), step(client)
    path = client.save_state(name).result().path
    step(client)
    expected = logprobs(client, probe)
    resumed = s.service.create_training_client_from_state_with_optimizer(path)
    step(resumed)
    with_moments = apart(expected, logprobs(resumed, probe))
    fresh = s.service.create_training_client_from_state(path)
    step(fresh)
    without = apart(expected, logprobs(fresh, probe))
    client.load_state_with_optimizer(path).result()
    step(client)
    back = apart(expected, logprobs(client, probe))
    assert with_moments < 1e-6 and back < 1e-6 and without > 1e-6, (with_moments, back, without)
    try:
        client.save_state(name).result()
    except tinker.RequestFailedError:
        pass
    else:
        raise AssertionError("a checkpoint was replaced without overwrite")
    return f"with moments {with_moments:.1e}, loaded {back:.1e}, without {without:.1e}"


def sampling_is_reproducible_and_agrees_with_training(s: Setup) -> str:
    client = s.model()
    client.forward_backward(s.mixed(), "cross_entropy")
    descend(client)
    sampler = client.save_weights_and_get_sampling_client()
    prompts = [s.inputs(60, 7), s.inputs(61, 5, image_at=2)]
    worst = 0.0
    for prompt in prompts:
        params = types.SamplingParams(max_tokens=12, seed=11, temperature=1.0, stop=[])
        first = sampler.sample(prompt, 3, params).result()
        others = [
            sampler.sample(s.inputs(70 + i, 4 + i), 2, types.SamplingParams(max_tokens=9, seed=i, stop=[]))
            for i in range(6)
        ]
        again = sampler.sample(prompt, 3, params).result()
        [other.result() for other in others]
        tokens = [list(q.tokens) for q in first.sequences]
        assert tokens == [list(q.tokens) for q in again.sequences]
        assert len({tuple(t) for t in tokens}) == 3, "samples of one request are alike"
        for sequence in first.sequences:
            full = types.ModelInput(chunks=[*prompt.chunks, types.EncodedTextChunk(tokens=list(sequence.tokens))])
            n = full.length
            following = [*flat(prompt)[1:], *sequence.tokens, s.plain[0]]
            fields = {
                "target_tokens": tensor(np.asarray(following, np.int64)),
                "weights": tensor(np.ones(n, np.float32)),
            }
            lp = logprobs(client, [types.Datum(model_input=full, loss_fn_inputs=fields)])[0]
            at = prompt.length - 1
            worst = max(worst, float(np.abs(lp[at : at + 12] - np.asarray(sequence.logprobs)).max()))
            scored = sampler.compute_logprobs(full).result()
            assert scored[0] is None and len(scored) == n
            worst = max(worst, float(np.abs(np.asarray(scored[prompt.length :]) - np.asarray(sequence.logprobs)).max()))
    assert worst < 1e-4, worst
    greedy = types.SamplingParams(max_tokens=8, temperature=0.0, stop=[])
    before = list(sampler.sample(prompts[0], 1, greedy).result().sequences[0].tokens)
    client.forward_backward(s.mixed(), "cross_entropy")
    descend(client, rate=0.5)
    assert before == list(sampler.sample(prompts[0], 1, greedy).result().sequences[0].tokens), "a snapshot changed"
    stop = types.SamplingParams(max_tokens=8, temperature=0.0, stop=[before[3]])
    stopped = sampler.sample(prompts[0], 1, stop).result().sequences[0]
    at = before.index(before[3])
    assert list(stopped.tokens) == before[: at + 1] and str(stopped.stop_reason).lower().endswith("stop")
    return f"log-probabilities {worst:.1e}"


def flat(model_input: types.ModelInput) -> list[int]:
    """Token ids, 0 where an image is."""
    ids: list[int] = []
    for chunk in model_input.chunks:
        ids.extend(chunk.tokens if isinstance(chunk, types.EncodedTextChunk) else [0] * chunk.length)
    return ids


CHECKS: tuple[Callable[[Setup], str], ...] = (
    a_batch_equals_its_datums,
    bad_requests_leave_no_trace,
    a_checkpoint_continues_the_run,
    sampling_is_reproducible_and_agrees_with_training,
)


def main(url: str, key: str) -> int:
    setup, failed = Setup(url, key), 0
    for check in CHECKS:
        try:
            seen, holds = check(setup), True
        except Exception:
            seen, holds = traceback.format_exc(), False
        failed += not holds
        print(json.dumps({"check": check.__name__, "holds": holds, "seen": seen}), flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
