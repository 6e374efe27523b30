"""The reference of this suite: unmodified transformers, each sample by itself.

vlmpack's promise is one sentence: **a packed sample gets exactly what it would get alone.** Here is the second half of
it, the slow and obvious way: the processor encodes one conversation, the model runs on that conversation, nothing is
padded and nothing is packed. The tests run the same conversations through vlmpack's public API and compare.

    conversations ──▶ processor ──▶ model, one sample at a time ──▶ Outcome ─┐
                                                                             ├─▶ differences(...) == []
    conversations ──▶ VLMCollator ──▶ PackedStep, one packed row ──▶ Outcome ┘

Of vlmpack only the tiny models and processors are used, which are transformers' own classes with random weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from fixtures.processors import tiny_model, tiny_processor
from PIL import Image

TOLERANCE = {
    "losses": 2e-6,  # float32 sums of some ten logarithms, in another order
    "logprobs": 5e-6,  # logits of order 1 after two layers, whose sums of 64 products have another order
    "gradients": 2e-5,  # the same, backwards, and summed over some hundred tokens
}
"""Largest difference that rounding explains, relative to the largest entry of the tensor (to 1, where that is less).
Measured: 2e-7, 2e-7 and 2e-6. A sample that attends to its neighbor differs by 1e-2 or more: see `test_guards.py`.
Everything else has no tolerance: ids, labels, positions, pixels and counts are equal."""
NOISE = 1e-6
"""Gradients this small, relative to the largest of the model, are rounding: of a key's bias, for one."""


# ---------------------------------------------------------------------- families


@dataclass(frozen=True)
class Case:
    """A model family, and how its chat template writes answers."""

    family: str
    shows: str
    """What it has that the others have not."""
    opening: str = "<|im_start|>assistant\n"
    """What the template writes before an answer."""
    ending: str = "<|im_end|>"
    """The token that ends an answer, which is learned with it."""
    has_images: bool = True

    def __str__(self) -> str:
        return self.family

    @property
    def processor(self) -> Any:
        """The family's processor; of a text model its tokenizer."""
        return processor_of(self.family) if self.has_images else processor_of("qwen3_vl").tokenizer

    @property
    def tokenizer(self) -> Any:
        return self.processor.tokenizer if self.has_images else self.processor

    def model(self, **settings: Any) -> Any:
        """A model with the same random weights at every call, as transformers makes it: nothing is enabled."""
        processor = processor_of(self.family if self.has_images else "qwen3_vl")
        return tiny_model(self.family, processor=processor, **settings)


@lru_cache
def processor_of(family: str) -> Any:
    processor = tiny_processor(family)
    processor.tokenizer.chat_template = processor.chat_template  # a text model's processor is its tokenizer
    return processor


CASES = (
    Case("qwen2_5_vl", "MRoPE, and a vision tower with windows"),
    Case("qwen3_vl", "interleaved MRoPE, and visual features added in deeper layers"),
    Case("qwen3_vl_moe", "experts"),
    Case("qwen3_5", "gated delta layers: a recurrent state and a convolution"),
    Case("glm4v", "another tower; an answer ends where the user speaks again", "<|assistant|>\n", "<|user|>"),
    Case(
        "gemma3", "sliding windows, and image tokens that attend both ways", "<start_of_turn>model\n", "<end_of_turn>"
    ),
    Case("internvl", "images as tiles, of which one image has one to seven"),
    Case("qwen3", "text alone", has_images=False),
)


# ---------------------------------------------------------------------- conversations


def picture(seed: int, width: int, height: int) -> Image.Image:
    """Noise, so that no two pictures have anything in common."""
    values = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(values)


def user(*parts: Any) -> dict[str, Any]:
    """A turn of the user: texts and pictures in their order."""
    content = [
        {"type": "text", "text": part} if isinstance(part, str) else {"type": "image", "image": part} for part in parts
    ]
    return {"role": "user", "content": content}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def conversations(case: Case) -> list[dict[str, Any]]:
    """Four samples of unequal lengths. The first and the last have the same question and images of one size, so that
    nothing but their pixels tells which image belongs to which."""
    a, b, c, d = (picture(seed, *size) for seed, size in enumerate([(90, 60), (64, 120), (150, 75), (90, 60)]))
    talks = [
        [user(a, "What is the total?"), assistant("The total is 75,000.")],
        [user("Add 2 and 2."), assistant("4"), user("And 3 and 3, in words?"), assistant("The sum of them is six.")],
        [user(b, "Which shop is it?"), assistant("Kopi Susu."), user("And this one?", c), assistant("Roti Coklat.")],
        [user(d, "What is the total?"), assistant("Nothing that I can read.")],
    ]
    return [{"messages": talk if case.has_images else without_images(talk)} for talk in talks]


def questions_about_one_image(case: Case) -> list[dict[str, Any]]:
    """Three answers to one long question about one image, and a sample that has nothing in common with them."""
    question = user(
        picture(7, 90, 120), "What is on this receipt? Read the receipt and answer in words, line by line. " * 2
    )
    talks = [[question, assistant(text)] for text in ("Two coffees.", "It shows nothing at all.", "Ayam bakar, 5,000.")]
    talks.insert(2, [user("Something else.", picture(8, 64, 64)), assistant("As you like.")])
    return [{"messages": talk if case.has_images else without_images(talk)} for talk in talks]


def questions_after_one_answer(case: Case) -> list[dict[str, Any]]:
    """A tree of depth three: two answers to one question, and two further questions after the second answer."""
    text = "What is on this receipt? Read the receipt and answer in words, line by line."
    question = user(picture(9, 90, 60), text)
    said = assistant("Nasi goreng for 25,000, two cups of coffee for 5,000 each, and nothing else that I can read.")
    talks = [
        [question, assistant("Only a total.")],
        [question, said, user("How many items are there?"), assistant("Three.")],
        [question, said, user("What is the total?"), assistant("The total is 35,000.")],
    ]
    return [{"messages": talk if case.has_images else without_images(talk)} for talk in talks]


def without_images(talk: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [
        {**turn, "content": [part for part in turn["content"] if part["type"] == "text"]}
        if turn["role"] == "user"
        else {**turn}
        for turn in talk
    ]


# ---------------------------------------------------------------------- one sample, as the processor encodes it


def encoded(case: Case, sample: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The processor's own tensors of one conversation, [1, S] and pixels, and its labels."""
    inputs = case.processor.apply_chat_template(
        sample["messages"], tokenize=True, return_dict=True, return_tensors="np"
    )
    inputs = {name: torch.from_numpy(np.asarray(value)) for name, value in inputs.items()}
    return {**inputs, "labels": labels_of(case, inputs["input_ids"][0].tolist())[None]}


def labels_of(case: Case, ids: Sequence[int]) -> torch.Tensor:
    """int64 [S]: the tokens between an answer's opening and its ending, the ending included; -100 elsewhere."""
    opening = case.tokenizer.encode(case.opening, add_special_tokens=False)
    (ending,) = case.tokenizer.encode(case.ending, add_special_tokens=False)
    labels, is_answer = [-100] * len(ids), False
    for i, token in enumerate(ids):
        if is_answer:
            labels[i] = token
            is_answer = token != ending
        if list(ids[max(0, i + 1 - len(opening)) : i + 1]) == opening:
            is_answer = True
    return torch.tensor(labels)


def media_of(inputs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors of images among a batch's: pixels, and grids where there are any."""
    return {name: value for name, value in inputs.items() if name in ("pixel_values", "image_grid_thw")}


def in_one_batch(samples: Sequence[Mapping[str, torch.Tensor]], *, pad: int, side: str = "right") -> dict[str, Any]:
    """A padded batch as anybody's collator makes it: [B, S] with the 2D mask, pixels one after the other."""
    fill = {"input_ids": pad, "labels": -100}
    width = max(sample["input_ids"].shape[1] for sample in samples)
    batch = {}
    for name in samples[0]:
        if name in ("pixel_values", "image_grid_thw"):
            continue
        rows = []
        for sample in samples:
            room = width - sample[name].shape[1]
            rows.append(F.pad(sample[name], (0, room) if side == "right" else (room, 0), value=fill.get(name, 0)))
        batch[name] = torch.cat(rows)
    media = [media_of(sample) for sample in samples if media_of(sample)]
    return {**batch, **{name: torch.cat([one[name] for one in media]) for name in (media[0] if media else ())}}


# ---------------------------------------------------------------------- outcomes


@dataclass
class Outcome:
    """What a model says about samples, one entry each, and the gradient of their mean loss."""

    targets: list[int]
    """Learned tokens of each sample."""
    losses: torch.Tensor
    """float32 [B]: cross-entropy (nats) of each sample, summed over its targets."""
    logprobs: list[torch.Tensor]
    """float32 [targets] of each sample."""
    gradients: dict[str, torch.Tensor]
    """Of the loss over all targets, by name of the parameter."""
    positions: list[torch.Tensor] = field(default_factory=list)
    """int64 [k, tokens] of each forward pass: what the text model's rotary embedding was given."""

    @property
    def loss(self) -> float:
        """Mean over all targets of all samples."""
        return float(self.losses.sum()) / sum(self.targets)


def run_alone(model: Any, samples: Sequence[Mapping[str, torch.Tensor]]) -> Outcome:
    """Run the plain model on one sample after the other; gradients add up."""
    model.zero_grad()
    total = sum(int((sample["labels"][:, 1:] != -100).sum()) for sample in samples)
    outcome = Outcome([], torch.zeros(len(samples)), [], {})
    for i, sample in enumerate(samples):
        with positions_seen(model) as positions:
            logprobs = target_logprobs(model, sample)
        (-logprobs.sum() / total).backward()
        outcome.targets.append(len(logprobs))
        outcome.losses[i] = -logprobs.detach().sum()
        outcome.logprobs.append(logprobs.detach())
        outcome.positions += positions
    outcome.gradients = gradients_of(model)
    return outcome


def target_logprobs(model: Any, sample: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """float32 [targets]: log-probability of each learned token, given those before it."""
    inputs = {name: value for name, value in sample.items() if name != "labels"}
    logits = model(**inputs, use_cache=False).logits[0, :-1].float()
    targets = sample["labels"][0, 1:]
    is_target = targets != -100
    return logits[is_target].log_softmax(-1).gather(1, targets[is_target, None])[:, 0]


def gradients_of(model: Any) -> dict[str, torch.Tensor]:
    """Of every parameter, zeros where there is none."""
    gradients = {}
    for name, parameter in model.named_parameters():
        gradients[name] = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
    return gradients


@contextmanager
def positions_seen(model: Any) -> Iterator[list[torch.Tensor]]:
    """Collect the positions [k, tokens] by which the text model rotates queries and keys, of its first layers.

    k is 1, or 3 (time, height, width) with MRoPE.
    """
    names = [name for name, _ in model.named_modules() if name.endswith("rotary_emb") and "vis" not in name]
    assert len(names) == 1, f"{names}: which is the text model's rotary embedding?"
    seen: list[torch.Tensor] = []

    def note(_: Any, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        if not seen:  # some models call it once for each kind of layer
            positions = named["position_ids"] if "position_ids" in named else arguments[1]
            seen.append(positions.detach().reshape(-1, positions.shape[-1]).clone())

    handle = model.get_submodule(names[0]).register_forward_pre_hook(note, with_kwargs=True)
    try:
        yield seen
    finally:
        handle.remove()


# ---------------------------------------------------------------------- comparison


def apart(seen: torch.Tensor, expected: torch.Tensor, scale: float = 1.0) -> float:
    """Largest difference, relative to the largest expected entry, or to `scale` if that is larger."""
    if seen.shape != expected.shape:
        return float("inf")
    if not expected.numel():
        return 0.0
    seen, expected = seen.detach().double(), expected.detach().double()
    difference = float((seen - expected).abs().max())
    return difference / max(float(expected.abs().max()), scale)


def differences(seen: Outcome, expected: Outcome) -> list[str]:
    """Everything about which two outcomes disagree, in words; empty: they are equal to rounding."""
    found = []
    if seen.targets != expected.targets:
        found.append(f"targets: {seen.targets}, alone {expected.targets}")
    for i in range(len(expected.losses)):
        if not apart(seen.losses[i], expected.losses[i]) <= TOLERANCE["losses"]:
            found.append(f"loss of sample {i}: {seen.losses[i]:.6f}, alone {expected.losses[i]:.6f}")
        if not (error := apart(seen.logprobs[i], expected.logprobs[i])) <= TOLERANCE["logprobs"]:
            found.append(f"log-probabilities of sample {i}: apart by {error:.1e}")
    return found + gradient_differences(seen.gradients, expected.gradients)


def gradient_differences(seen: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> list[str]:
    """Parameters whose gradients disagree."""
    if seen.keys() != expected.keys():
        return [f"parameters: {sorted(seen.keys() ^ expected.keys())} have a gradient on one side only"]
    scale = NOISE / TOLERANCE["gradients"] * max(float(gradient.abs().max()) for gradient in expected.values())
    errors = {name: apart(seen[name], expected[name], scale) for name in expected}
    return [f"gradient of {name}: apart by {e:.1e}" for name, e in errors.items() if not e <= TOLERANCE["gradients"]]
