"""GRPO in your own training loop: all answers to a prompt, with its image, go through the model as one prefix tree.

    python examples/grpo_own_loop.py
    python examples/grpo_own_loop.py --model Qwen/Qwen3-VL-2B-Instruct --warmup 0 --rate 1e-6

The model is asked for a receipt's total. The reward is the share of its digits that are right. Without --model, a tiny
random model is trained, first supervised, to learn what an answer looks like.
"""

import argparse
import copy
import json
from typing import Any

import torch
from transformers import AutoModelForImageTextToText

from vlmpack import PackedStep, VLMCollator, enable_packing, unpack
from vlmpack.collate import SharePrefixes
from vlmpack.data import load_processor
from vlmpack.testing import SyntheticReceipts, tiny_model, tiny_processor

IGNORE = -100


def ask(processor: Any, image: Any) -> Any:
    """Return the processor's output for one prompt: an image and a question, up to the start of the answer."""
    content = [{"type": "image", "image": image}, {"type": "text", "text": "What is the total?"}]
    messages = [{"role": "user", "content": content}]
    settings = {"add_generation_prompt": True, "tokenize": True, "return_dict": True, "return_tensors": "pt"}
    return processor.apply_chat_template(messages, **settings)


def sample(prompt: Any, answer: torch.Tensor) -> dict[str, Any]:
    """Return a tokenized sample; the prompt is not trained on."""
    start = prompt["input_ids"][0]
    labels = torch.cat([torch.full_like(start, IGNORE), answer])
    pixels = {name: prompt[name] for name in ("pixel_values", "image_grid_thw")}
    return {"input_ids": torch.cat([start, answer]), "labels": labels, **pixels}


@torch.no_grad()
def draw(model: Any, prompt: Any, end: int, *, count: int, length: int, temperature: float) -> list[torch.Tensor]:
    """Sample answers with the model's own `generate`, from the whole vocabulary except media placeholders."""
    media = [model.config.image_token_id, model.config.video_token_id]
    sampling = {"do_sample": True, "top_k": 0, "top_p": 1.0, "temperature": temperature, "suppress_tokens": media}
    lengths = {"num_return_sequences": count, "max_new_tokens": length}
    sequences = model.generate(**prompt, **sampling, **lengths, eos_token_id=end, pad_token_id=end)
    answers = sequences[:, prompt["input_ids"].shape[1] :].cpu()
    ends = [*(answer.tolist().index(end) + 1 if end in answer else len(answer) for answer in answers)]
    return [answer[:stop] for answer, stop in zip(answers, ends, strict=True)]


def digits_right(answer: str, total: str) -> float:
    """Compute the reward: the fraction of digits that are correct and in the right place."""
    return sum(a == b for a, b in zip(answer, total, strict=False)) / max(len(answer), len(total), 1)


def grpo_loss(
    new: torch.Tensor,
    old: torch.Tensor,
    reference: torch.Tensor,
    advantages: torch.Tensor,
    is_target: torch.Tensor,
    *,
    clip: float = 0.2,
    beta: float = 0.02,
) -> torch.Tensor:
    """Compute the clipped objective with a KL penalty against the reference: a mean over tokens, then over samples.

    Args:
        new, old, reference: [B, S] log-probabilities under the policy, the policy that drew the samples, the reference.
        advantages: [B], one advantage for each sample.
        is_target: bool [B, S], True for tokens that were drawn.
        clip: the ratio is clipped to 1 - clip ... 1 + clip.
        beta: weight of the penalty, exp(d) - d - 1 with d = reference - new (Schulman's estimator of the divergence).
    """
    ratio, weight = (new - old).exp(), advantages[:, None]
    gain = torch.minimum(ratio * weight, ratio.clamp(1 - clip, 1 + clip) * weight)
    penalty = (reference - new).exp() - (reference - new) - 1
    return (((beta * penalty - gain) * is_target).sum(1) / is_target.sum(1)).mean()


def main(args: argparse.Namespace) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    load_model: Any = AutoModelForImageTextToText.from_pretrained
    processor = load_processor(args.model) if args.model else tiny_processor()
    loaded = load_model(args.model, dtype=torch.float32) if args.model else tiny_model(processor=processor)
    model = enable_packing(loaded.to(device))  # pyright: ignore[reportArgumentType]
    step, optimizer = PackedStep(model), torch.optim.AdamW(model.parameters(), lr=args.rate, weight_decay=0.0)
    sharing = SharePrefixes(min_shared=16)  # the default, 64, is longer than these prompts
    collate: Any = VLMCollator(processor, layout="packed", share_prefixes=sharing).collate
    tokenizer: Any = processor.tokenizer
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")

    drawn = SyntheticReceipts(num=args.receipts, scale=0.35)
    receipts = [drawn[i] for i in range(args.receipts)]
    prompts = [ask(processor, receipt["image"].convert("RGB").resize((192, 256))) for receipt in receipts]
    parses = [json.loads(receipt["ground_truth"])["gt_parse"] for receipt in receipts]
    totals = ["".join(filter(str.isdigit, parse["total"]["total_price"])) for parse in parses]

    answers = [torch.tensor([*tokenizer.encode(total, add_special_tokens=False), end]) for total in totals]
    for _ in range(args.warmup):
        result = step(collate([sample(prompt, answer) for prompt, answer in zip(prompts, answers, strict=True)]))
        result.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    reference = PackedStep(copy.deepcopy(model).requires_grad_(False))

    for group in optimizer.param_groups:
        group["lr"] = args.rate / (5 if args.warmup else 1)
    for number in range(args.rounds):
        samples, advantages, rewards = [], [], []
        settings = {"count": args.group, "length": args.length, "temperature": args.temperature}
        for prompt, total in zip(prompts, totals, strict=True):
            group = draw(model, prompt.to(device), end, **settings)
            texts = [tokenizer.decode(answer, skip_special_tokens=True) for answer in group]
            scores = torch.tensor([digits_right(text, total) for text in texts])
            rewards += scores.tolist()
            advantages += ((scores - scores.mean()) / (scores.std() + 1e-6)).tolist()
            samples += [sample(prompt, answer) for answer in group]
        row = collate(samples)  # one tree per prompt; its samples are the branches
        is_target = unpack(row.shift_labels != IGNORE, row.segments).to(device)
        weights = torch.tensor(advantages, device=device)
        with torch.no_grad():
            drawn_by, start = (run(row, temperature=args.temperature) for run in (step, reference))
        for _ in range(args.iterations):
            result = step(row, temperature=args.temperature)
            grpo_loss(result.logprobs, drawn_by.logprobs, start.logprobs, weights, is_target).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        tokens = f"{drawn_by.work.physical_tokens} of {drawn_by.work.real_tokens} tokens computed"
        print(f"round {number}: mean reward {sum(rewards) / len(rewards):.3f}, {tokens}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="hub id or folder; without it, a tiny random Qwen3-VL")
    parser.add_argument("--receipts", type=int, default=4)
    parser.add_argument("--warmup", type=int, default=20, help="supervised steps before GRPO")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--group", type=int, default=16, help="answers per question and round")
    parser.add_argument("--length", type=int, default=12, help="maximum tokens of an answer")
    parser.add_argument("--iterations", type=int, default=2, help="optimizer steps per round")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument(
        "--rate", type=float, default=3e-3, help="learning rate; GRPO after --warmup uses a fifth of it"
    )
    main(parser.parse_args())
