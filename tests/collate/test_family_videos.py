"""Videos in messages of GLM-4V, ERNIE, LLaVA-OneVision and MiniCPM-V: the frames, tokens and tensors of the model's own
processor, and packed as alone.

Their video processors need torchvision. Where it is missing, these tests run once in a process of their own, with the
three functions of it that are used (`transformers_videos.stand_in`).
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from chats import picture, says, text, user
from clips import write_clip
from equality import limits_of, problems
from fixtures.processors import tiny_model, tiny_processor
from transformers_videos import is_installed

from vlmpack import VLMCollator
from vlmpack.errors import SampleError
from vlmpack.rows import PackedDataset, StoreSettings, write_rows
from vlmpack.testing.comparison import compare, run_alone, run_packed

HERE = Path(__file__)
VIDEO = {
    "glm4v": ("Glm4vVideoProcessor", {"size": {"shortest_edge": 56 * 56, "longest_edge": 2 * 112 * 112}}, (
        "<|begin_of_video|><|video|><|end_of_video|>"
    )),
    "glm46v": ("Glm46VVideoProcessor", {"size": {"shortest_edge": 56 * 56, "longest_edge": 2 * 112 * 112}}, (
        "<|begin_of_video|><|video|><|end_of_video|>"
    )),
    "ernie4_5_vl_moe": ("Ernie4_5_VLMoeVideoProcessor", {
        "size": {"shortest_edge": 56 * 56, "longest_edge": 112 * 112}, "draw_on_frames": False, "min_frames": 4,
        "fps": 2,
    }, "<|VIDEO_START|><|VIDEO_PLACEHOLDER|><|VIDEO_END|>"),
    **{family: (f"qwen{n}_vl.video_processing_qwen{n}_vl.Qwen{n}VLVideoProcessor", {
        "patch_size": 14, "size": {"shortest_edge": 56 * 56, "longest_edge": 4 * 112 * 112},
    }, f"{start}<|video_pad|>{end}") for family, n, start, end in (
        ("exaone4_5", 2, "<vision>", "</vision>"), ("lfm3_vl", 3, "<|vision_start|>", "<|vision_end|>")
    )},
    "llava_onevision": ("LlavaOnevisionVideoProcessor", {}, "<video>"),
    "minicpmv4_6": ("MiniCPMV4_6VideoProcessor", {"scale_resolution": 64, "max_slice_nums": 4}, "<|video_pad|>"),
    **{family: (f"{name}VideoProcessor", {"patch_size": 4, "pooling_kernel_size": 2, "num_frames": 4}, "<|video|>")
       for family, name in (("gemma4", "Gemma4"), ("gemma4_unified", "Gemma4Unified"))},
    "internvl": ("InternVLVideoProcessor", {"do_sample_frames": True, "num_frames": 3}, "<video>"),
    "smolvlm": ("SmolVLMVideoProcessor", {
        "size": {"longest_edge": 84}, "max_image_size": {"longest_edge": 28}, "do_sample_frames": True, "num_frames": 8,
        "fps": 2,
    }, "<video>"),
}  # fmt: skip
"""Class of the video processor, its settings, and what a template writes for a video."""
TOKENS = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids")
pytestmark = [pytest.mark.filterwarnings("ignore:__array_:DeprecationWarning")]  # transformers' own
needs = pytest.mark.skipif(not is_installed(), reason="torchvision cannot be imported")


def processor_with_videos(family: str) -> Any:
    name, settings, written = VIDEO[family]
    processor = tiny_processor(family)
    module, _, name = name.rpartition(".")
    module = import_module(f"transformers.models.{module or f'{family}.video_processing_{family}'}")
    settings = {**settings, "patch_size": processor.image_processor.patch_size} if family == "minicpmv4_6" else settings
    if family in ("llava_onevision", "internvl"):
        settings = {**settings, "size": {side: processor.image_processor.size[side] for side in ("height", "width")}}
    processor.video_processor = getattr(module, name)(**settings)
    if "'video'" not in processor.chat_template:
        text = "{% else %}{{ part['text'] }}"
        assert text in processor.chat_template
        case = f"{{% elif part['type'] == 'video' %}}{{{{ '{written}' }}}}{text}"
        processor.chat_template = processor.chat_template.replace(text, case)
    return processor


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Two seconds, 24 frames."""
    path = tmp_path_factory.mktemp("clip") / "clip.mp4"
    write_clip(path, num_frames=24, fps=12)
    return str(path)


def asked(video: Any, **keys: Any) -> dict[str, Any]:
    content = [{"type": "video", "video": video, **keys}, text("What happens?")]
    user = {"role": "user", "content": content}
    return {"messages": [user, says([text("It gets lighter.")])]}


def frames(count: int) -> list[Any]:
    return [picture(96, 64, seed=at) for at in range(count)]


def by_transformers(processor: Any, video: Any, **metadata: Any) -> dict[str, Any]:
    """The processor's own ids and tensors of a file, or of frames and their metadata."""
    text = processor.apply_chat_template(asked(video)["messages"], tokenize=False)
    options: dict[str, Any] = {"video_metadata": [[metadata]] if metadata else None}
    if isinstance(video, list):
        video, options["do_sample_frames"] = np.stack([np.asarray(frame) for frame in video]), False
    else:
        part = processor.video_processor
        keys = {name: getattr(part, name, None) for name in part.valid_kwargs.__annotations__}
        (loaded, found) = import_module("transformers.video_utils").load_video(
            video, backend="pyav", sample_indices_fn=lambda metadata, **_: part.sample_frames(metadata, **keys)
            if part.do_sample_frames else range(metadata.total_num_frames),
        )  # fmt: skip
        video, options = loaded, {"video_metadata": [[found]], "do_sample_frames": False}
    if processor.tokenizer.bos_token and text.startswith(processor.tokenizer.bos_token):
        options["add_special_tokens"] = False  # as apply_chat_template(tokenize=True) calls it
    return dict(processor(text=[text], videos=[video], return_tensors="pt", **options))


CASES = {
    "a file": lambda clip: ((clip, {}), {}),
    "frames at a rate": lambda _: ((frames(6), {"fps": 3}), {"fps": 3.0, "frames_indices": [*range(6)]}),
    "frames by their numbers": lambda _: (
        (frames(4), {"frames_indices": [0, 5, 7, 20], "fps": 4}), {"fps": 4.0, "frames_indices": [0, 5, 7, 20]}),
    "frames by their seconds": lambda _: (
        (frames(4), {"timestamps": [0, 1.5, 2, 8]}), {"fps": 2.0, "frames_indices": [0, 3, 4, 16]}),
}  # fmt: skip


@needs
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("family", VIDEO)
def test_tokens_and_tensors_are_the_processor_s_own(family: str, case: str, clip: str, tmp_path: Path) -> None:
    processor = processor_with_videos(family)
    (video, keys), metadata = CASES[case](clip)
    more = {"total_num_frames": len(video)} if metadata else {}
    truth = by_transformers(processor, video, **metadata, **more)
    collator, feature = VLMCollator(processor), asked(video, **keys)
    batch = collator([feature])
    assert batch["input_ids"].tolist() == truth["input_ids"].tolist()
    media = {name: tensor for name, tensor in truth.items() if name not in TOKENS}
    assert any(name.startswith("pixel_values") for name in media)
    for name, tensor in media.items():
        assert torch.equal(batch[name], torch.as_tensor(tensor)), name
    if "mm_token_type_ids" in truth:
        assert batch["mm_token_type_ids"].tolist() == truth["mm_token_type_ids"].tolist()
    measured = collator.measure(feature)
    assert [visual.pixels for visual in (*measured.images, *measured.videos)] == [None]
    assert measured.input_ids.tolist() == truth["input_ids"][0].tolist()
    rows = VLMCollator(processor, layout="packed")
    write_rows([feature], tmp_path, rows, StoreSettings(capacity=4096))
    stored = PackedDataset(tmp_path, processor)[0]
    assert all(torch.equal(stored[name], tensor) for name, tensor in rows([feature]).items() if torch.is_tensor(tensor))
    decoded = collator.decode([measured])
    assert decoded.labels.tolist() == batch["labels"].tolist()
    assert all(torch.equal(tensor, batch[name]) for name, tensor in decoded.media.to_hf().items())
    learnt = processor.tokenizer.decode([i for i in batch["labels"][0].tolist() if i != -100])
    assert learnt.strip().startswith("It gets lighter.")


@needs
@pytest.mark.parametrize("family", ["internvl", "smolvlm", "gemma4", "gemma4_unified"])
def test_videos_beside_images_and_in_later_turns_are_packed_as_alone(family: str) -> None:
    processor, clips = processor_with_videos(family), [frames(3), frames(3)[::-1]]  # its own call takes one length
    first, other = ({"type": "video", "video": clip, "fps": 2} for clip in clips)
    images = [picture()] * (family != "smolvlm")  # whose own call gives the pixels of either
    shown = [{"type": "image", "image": each} for each in images]
    turns = [user([first, *shown, text("One?")]), says([text("Yes.")]), user([*shown, other, text("Two?")])]
    features = [
        {"messages": [*turns, says([text("No.")])]},
        asked(clips[1], fps=2),
        {"prompt": "2 + 2 =", "completion": "4"},
    ]
    collator, samples = VLMCollator(processor), []
    for feature, videos, pictures in zip(features, (clips, clips[1:], []), (images * 2, [], []), strict=True):
        alone = collator([feature])
        truth, given = dict(alone), [np.stack([np.asarray(frame) for frame in clip]) for clip in videos]
        if videos:
            times = [
                {"total_num_frames": len(clip), "fps": 2.0, "frames_indices": [*range(len(clip))]} for clip in clips
            ]
            truth = processor(
                text=[processor.apply_chat_template(feature["messages"], tokenize=False)],
                images=pictures or None,
                videos=given,
                video_metadata=[times[-len(given) :]],
                do_sample_frames=False,
                return_tensors="pt",
                add_special_tokens=False,
            )
            assert truth["input_ids"].tolist() == alone["input_ids"].tolist()
        sample = {name: truth[name] for name in truth if name not in (*TOKENS, "labels", "vlmpack")}
        samples.append(sample | {name: alone[name][0] for name in ("input_ids", "labels", "mm_token_type_ids")})
        assert collator.length(feature) == len(samples[-1]["input_ids"])
    model = tiny_model(family, processor=processor)
    truth = run_alone(model, samples)
    for layout in ("padded", "packed"):
        batch = VLMCollator(processor, layout=layout).collate(features)
        assert not problems(compare(run_packed(model, batch, samples), truth), limits_of(family))
    cut = VLMCollator(processor, max_length=collator.length(features[0]) - 40, overlength="truncate").collate(
        features[:1]
    )
    assert [len(medium.runs) for medium in cut.metadata.media.media].count(3) == 1
    assert len(cut.metadata.media.media) == 1 + 2 * len(shown)


@needs
def test_videos_of_several_lengths_share_a_batch_where_the_model_takes_one_length_in_a_call() -> None:
    processor, features = processor_with_videos("llava_onevision"), [asked(frames(count)) for count in (4, 6, 4)]
    model = tiny_model("llava_onevision", processor=processor)
    alone = [VLMCollator(processor)([feature]) for feature in features]
    names: Any = ("input_ids", "labels", "mm_token_type_ids")
    samples: list[Any] = [
        {name: each[name][0] for name in names} | {"pixel_values_videos": each["pixel_values_videos"]} for each in alone
    ]
    truth = run_alone(model, samples)
    for layout in ("padded", "packed"):
        batch = VLMCollator(processor, layout=layout).collate(features)
        assert batch.media.pixel_values_videos.shape[:2] == (3, 6)
        assert not problems(compare(run_packed(model, batch, samples), truth), limits_of("llava_onevision"))


@needs
def test_keys_that_a_video_processor_does_not_read_are_refused(clip: str) -> None:
    collator = VLMCollator(processor_with_videos("glm4v"))
    assert len(collator.measure(asked(clip, fps=1)).media["video"][0].runs) == 1
    for keys, said in (
        ({"nframes": 4}, "num_frames chooses no frames of a Glm4vVideoProcessor; it reads fps"),
        ({"video_start": 1}, "video_start chooses no frames"),
        ({"max_pixels": 9999}, "sizes all videos alike"),
        ({"timestamps": [1]}, "a file's frames have their times in it"),
    ):
        with pytest.raises(SampleError, match=said) as caught:
            collator.measure(asked(clip, **keys))
        assert caught.value.reason == "vision_key"


def test_without_a_video_processor_videos_are_refused_by_name() -> None:
    with pytest.raises(SampleError, match="this Glm4vProcessor has no video processor, which needs torchvision"):
        VLMCollator(tiny_processor("glm4v")).measure(asked(frames(2)))


@pytest.mark.slow
@pytest.mark.skipif(is_installed(), reason="they ran in this process")
def test_all_of_this_where_torchvision_is_stood_in_for() -> None:
    chosen = "not refused_by_name" + (" and not smolvlm" if find_spec("num2words") is None else "")
    options = ["-q", "-n", "0", "-p", "no:cacheprovider", "-m", "not slow", "-k", chosen, str(HERE)]
    run = "import sys, transformers_videos as v, pytest; v.stand_in(); v.is_installed = lambda: True; "
    run += f"sys.exit(pytest.main({options}))"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE.parents[1]), *sys.path])}
    done = subprocess.run([sys.executable, "-c", run], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stdout[-4000:]
    assert "passed" in done.stdout
    assert "skipped" not in done.stdout, done.stdout[-2000:]
