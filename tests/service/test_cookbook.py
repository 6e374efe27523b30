"""Recipes of the published tinker-cookbook, unmodified, against `vlmpack serve`: two steps each of a tiny model.

They run in a folder in which each name of a model or data set on the hub is a folder with a small one of the same form.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import urllib.request
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from fixtures.processors import tiny_model, tiny_processor
from service.server_process import KEY, Server
from step_service import png

COOKBOOK = Path(sys.prefix) / "cookbook-0.6.1"
MODEL = "Qwen/Qwen3.5-9B-Base"
SUM = {"question": "2 + 2?", "answer": "It is 4. #### 4"}
DATA: dict[str, Any] = {
    "HuggingFaceH4/no_robots": {"messages": [{"role": role, "content": "4"} for role in ("user", "assistant")]},
    "Anthropic/hh-rlhf": {each: f"\n\nHuman: 2 + 2?\n\nAssistant: {each}" for each in ("chosen", "rejected")},
    "openai/gsm8k": SUM,
    "zwhe99/DeepMath-103K": SUM,
    "open-thoughts/OpenThoughts3-1.2M": {"conversations": [{"from": who, "value": "4"} for who in ("human", "gpt")]},
}
FEW, RL = "max_steps=2 log_path=log/{} ", "group_size=4 loss_fn={} max_tokens=4 "
RECIPES = {
    "sl_loop": f"{FEW} batch_size=2 save_every=1",
    "chat_sl.train": f"{FEW} batch_size=2",
    "preference.dpo.train": f"{FEW} batch_size=2",
    "rl_loop": f"{FEW} batch_size=2 {RL.format('gspo')}",
    "math_rl.train": f"{FEW} model_name={MODEL} groups_per_batch=2 {RL.format('importance_sampling')}",
    "distillation.on_policy_distillation": f"{FEW} groups_per_batch=2 group_size=2 max_tokens=4 teacher_model={MODEL}",
    "distillation.off_policy_reasoning": f"{FEW} batch_size=2 buffer_size=8 max_prompts=8",
    "vlm_classifier.train": f"max_steps=2 experiment_dir=log batch_size=2 n_eval=2 max_tokens=4 model_name={MODEL}",
}
"""Arguments of each recipe: fewer and shorter samples than its defaults, a loss that is served, and the served name."""
PROGRAM = """
import os, runpy, sys, zlib
from tinker_cookbook.recipes.math_rl import math_grading
math_grading.extract_boxed = lambda text: text  # a random model is never right, and without rewards nothing is trained
math_grading.grade_answer = lambda text, _: zlib.crc32(text.encode()) % 2
for recipe in sys.argv[1:]:
    sys.argv[:] = recipe.split()
    runpy.run_module(f"tinker_cookbook.recipes.{sys.argv[0]}", run_name="__main__", alter_sys=True)
sys.stdout.flush()
os._exit(0)  # the client's daemon thread still runs: an interpreter that ends below it may abort
"""


def write_hub(folder: Path) -> None:
    processor = tiny_processor("qwen3_5", max_pixels=64 * 32 * 32)
    processor.tokenizer.add_tokens(["<think>", "</think>"])
    tiny_model("qwen3_5", processor=processor).save_pretrained(folder / MODEL)
    processor.save_pretrained(folder / MODEL)
    for name, row in DATA.items():
        (folder / name).mkdir(parents=True)
        for split in ("train", "test"):
            (folder / name / f"{split}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for _ in range(8)))
        files = [{"split": split, "path": f"{split}.jsonl"} for split in ("train", "test")]
        head = {"configs": [{"config_name": each, "data_files": files} for each in ("default", "main")]}
        (folder / name / "README.md").write_text(f"---\n{json.dumps(head)}\n---\n")
    for at in range(16):
        image = folder / "dpdl-benchmark/caltech101" / ("train", "test")[at % 2] / ("cat", "dog")[at // 8] / f"{at}.png"
        image.parent.mkdir(parents=True, exist_ok=True)
        image.write_bytes(png(64, 64, seed=at))


@pytest.mark.slow
@pytest.mark.skipif(not COOKBOOK.is_dir(), reason="needs tinker-cookbook, which the Makefile installs")
def test_recipes_train_two_steps(tmp_path: Path) -> None:
    write_hub(tmp_path)
    with closing(Server(tmp_path / "state", "--name", MODEL, model=str(tmp_path / MODEL))) as server:
        path = os.pathsep.join((str(COOKBOOK), os.environ.get("PYTHONPATH", "")))
        address = {"TINKER_BASE_URL": server.url, "TINKER_API_KEY": KEY, "TINKER_TELEMETRY": "0", "PYTHONPATH": path}
        recipes = [f"{name} {arguments.format(name)}" for name, arguments in RECIPES.items()]
        command = [sys.executable, "-W", "ignore", "-c", PROGRAM, *recipes]
        ended = subprocess.run(
            command, env={**os.environ, **address}, cwd=tmp_path, capture_output=True, text=True, timeout=600
        )
        assert ended.returncode == 0, ended.stderr[-4000:] + server.printed()
        with urllib.request.urlopen(f"{server.url}/metrics") as reply:
            counted = dict(re.findall(r'requests_total{kind="(\w+)"} (\d+)', reply.read().decode()))
        assert int(counted["OptimStep"]) == 2 * len(RECIPES)
        assert int(counted["Sample"]) > 0
