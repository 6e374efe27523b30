"""Fine-tune on receipts through the step service with the unmodified Tinker client: supervised, then GRPO.

    vlmpack serve --demo --port 8000            # or: vlmpack serve Qwen/Qwen3-VL-2B-Instruct
    TINKER_API_KEY=tml-... python examples/tinker_client.py --url http://127.0.0.1:8000

The model is asked for a receipt's total and answers with its digits. GRPO's reward is the share of digits that are
right.
"""

import argparse
import io
import json

import numpy as np
import tinker
from tinker import types

from vlmpack.testing import SyntheticReceipts

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--url", default="http://127.0.0.1:8000", help="address of the service")
parser.add_argument("--receipts", type=int, default=8)
parser.add_argument("--epochs", type=int, default=8, help="supervised epochs")
parser.add_argument("--rounds", type=int, default=8, help="GRPO rounds")
parser.add_argument("--group", type=int, default=16, help="answers per receipt and round")
parser.add_argument("--rate", type=float, default=2e-2, help="learning rate; GRPO uses a fifth of it")
args = parser.parse_args()

TOKEN_SIDE = 32  # side of an image token of Qwen3-VL, in pixels
COLUMNS, ROWS = 6, 8  # an image of 192 x 256 pixels has 48 tokens

service = tinker.ServiceClient(base_url=args.url)
base_model = tinker.RestClient(base_url=args.url).get_server_capabilities().result().supported_models[0].model_name
assert base_model is not None
client = service.create_lora_training_client(base_model=base_model, rank=16, seed=0).result()
tokenizer = client.get_tokenizer()
(end_of_turn,) = tokenizer.encode("<|im_end|>", add_special_tokens=False)


def encode(text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def question(receipt: dict) -> types.ModelInput:
    """Return the prompt: the image and the question, up to the start of the answer."""
    file = io.BytesIO()
    receipt["image"].convert("RGB").resize((COLUMNS * TOKEN_SIDE, ROWS * TOKEN_SIDE)).save(file, "PNG")
    image = types.ImageChunk(data=file.getvalue(), format="png", expected_tokens=COLUMNS * ROWS)
    before = types.EncodedTextChunk(tokens=encode("<|im_start|>user\n<|vision_start|>"))
    after = "<|vision_end|>What is the total?<|im_end|>\n<|im_start|>assistant\n"
    return types.ModelInput(chunks=[before, image, types.EncodedTextChunk(tokens=encode(after))])


def datum(prompt: types.ModelInput, answer: list[int], **fields: list[float]) -> types.Datum:
    """Return a prompt with its answer. Position i predicts token i + 1.

    `fields` have one value for each token of the answer; 0 is filled in before them.
    """
    before = prompt.length - 1
    targets = np.array([0] * before + answer, np.int64)
    columns = {name: np.array([0.0] * before + values, np.float32) for name, values in fields.items()}
    chunks = [*prompt.chunks, types.EncodedTextChunk(tokens=answer[:-1])] if len(answer) > 1 else prompt.chunks
    tensors = {
        name: types.TensorData.from_numpy(values) for name, values in (("target_tokens", targets), *columns.items())
    }
    return types.Datum(model_input=types.ModelInput(chunks=chunks), loss_fn_inputs=tensors)


def digits_right(answer: str, total: str) -> float:
    """Compute the reward: the fraction of digits that are correct and in the right place."""
    return sum(a == b for a, b in zip(answer, total, strict=False)) / max(len(answer), len(total), 1)


drawn = SyntheticReceipts(num=args.receipts, scale=0.35)
receipts = [drawn[i] for i in range(len(drawn))]
prompts = [question(receipt) for receipt in receipts]
parses = [json.loads(receipt["ground_truth"])["gt_parse"] for receipt in receipts]
totals = ["".join(filter(str.isdigit, parse["total"]["total_price"])) for parse in parses]

for epoch in range(args.epochs):
    answers = [[*encode(total), end_of_turn] for total in totals]
    data = [datum(p, a, weights=[1.0] * len(a)) for p, a in zip(prompts, answers, strict=True)]
    trained = client.forward_backward(data, "cross_entropy")
    client.optim_step(types.AdamParams(learning_rate=args.rate))
    print(f"supervised {epoch}: loss {trained.result().metrics['loss:sum'] / sum(map(len, answers)):.4f} a token")

for step in range(args.rounds):
    sampler = client.save_weights_and_get_sampling_client().result()
    settings = [
        types.SamplingParams(max_tokens=12, stop=[end_of_turn], seed=1000 * step + i) for i in range(len(prompts))
    ]
    samples = [sampler.sample(p, args.group, s) for p, s in zip(prompts, settings, strict=True)]
    data, rewards = [], []
    for prompt, total, future in zip(prompts, totals, samples, strict=True):
        group = [(list(s.tokens), list(s.logprobs or [])) for s in future.result().sequences]
        scores = np.array([digits_right(str(tokenizer.decode(t, skip_special_tokens=True)), total) for t, _ in group])
        rewards.extend(scores)
        for (tokens, logprobs), advantage in zip(group, (scores - scores.mean()) / (scores.std() + 1e-6), strict=True):
            if advantage:
                data.append(datum(prompt, tokens, logprobs=logprobs, advantages=[advantage] * len(tokens)))
    print(f"GRPO {step}: mean reward {np.mean(rewards):.3f}, {len(data)} datums", flush=True)
    if data:
        client.forward_backward(data, "importance_sampling")
        client.optim_step(types.AdamParams(learning_rate=args.rate / 5)).result()

print("saved:", client.save_state("receipts", overwrite=True).result().path)
