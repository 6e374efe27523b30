"""Audio in messages: arrays to log-mel frames and tokens, as Qwen-Omni's own processor makes them as a whole."""

from __future__ import annotations

import copy
import io
import json
import wave
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import slow
from chats import says, text, user
from fixtures.processors import tiny_processor
from PIL import Image
from transformers import Qwen2_5OmniConfig, Qwen3OmniMoeConfig

from vlmpack.cli.models import named_processor
from vlmpack.collate import VLMCollator
from vlmpack.data import load_processor, open_dataset
from vlmpack.errors import ConfigError, SampleError
from vlmpack.layout.media import AUDIO
from vlmpack.lengths import measure_lengths

POOLED, CONVOLVED = "qwen2_5_omni_thinker", "qwen3_omni_moe_thinker"
RATE = 16_000
each_family = pytest.mark.parametrize("family", [POOLED, CONVOLVED])


@lru_cache
def processor_of(family: str) -> Any:
    return tiny_processor(family)


def sound(samples: int, seed: int = 0) -> np.ndarray:
    """Noise of so many samples."""
    return np.random.default_rng(seed).normal(scale=0.1, size=samples).astype(np.float32)


def picture() -> Image.Image:
    return Image.fromarray(np.random.default_rng(1).integers(0, 255, (120, 90, 3), dtype=np.uint8))


def messages(*media: dict[str, Any]) -> list[dict[str, Any]]:
    """A question about media, and its answer."""
    return [user([text("Listen: "), *media, text(" What is it?")]), says([text("A dog.")])]


def heard(samples: int, seed: int = 0) -> dict[str, Any]:
    return {"type": "audio", "audio": sound(samples, seed)}


MIXED = ("audio", "image", "audio")


@lru_cache
def whole(family: str) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """(a sample with two audios and an image, what the processor as a whole makes of it)."""
    arrays = [sound(2 * RATE + 77), sound(9_000, seed=1)]  # no whole number of frames
    given = iter(arrays)
    parts = [
        heard(0) | {"audio": next(given)} if kind == "audio" else {"type": kind, kind: picture()} for kind in MIXED
    ]
    processor = processor_of(family)
    text = processor.apply_chat_template(messages(*({"type": kind} for kind in MIXED)), tokenize=False)
    made = processor(text=[text], images=[picture()], audio=arrays, return_tensors="pt")
    return {"messages": messages(*parts)}, dict(made)


def check_equal(batch: dict[str, Any], made: dict[str, torch.Tensor]) -> None:
    for name in ("input_ids", "pixel_values", "image_grid_thw"):
        assert torch.equal(batch[name], made[name])
    kept = batch["feature_attention_mask"].bool()
    assert torch.equal(kept.sum(1), made["feature_attention_mask"].sum(1))
    assert kept.shape[1] == kept.sum(1).max()  # what a processor pads to its longest is cut off
    for at, mask in enumerate(made["feature_attention_mask"].bool()):
        assert torch.equal(batch["input_features"][at][:, kept[at]], made["input_features"][at][:, mask])


@each_family
def test_a_sample_is_what_the_whole_processor_makes(family: str) -> None:
    sample, made = whole(family)
    collator = VLMCollator(processor_of(family))
    batch = collator([sample])
    check_equal(batch, made)
    frames = [audio.frames for audio in batch["vlmpack"].media.audios]
    assert frames == made["feature_attention_mask"].sum(1).tolist()
    assert len(batch["vlmpack"].media.audios) == 2
    assert (batch["mm_token_type_ids"] == AUDIO).sum() == (batch["input_ids"] == collator.metadata.audio_token_id).sum()
    learnt = processor_of(family).tokenizer.decode(batch["labels"][0][batch["labels"][0] != -100])
    assert learnt == "A dog.<|im_end|>"


@each_family
def test_measured_and_tokenized_samples_are_the_same_batch(family: str) -> None:
    sample, made = whole(family)
    collator = VLMCollator(processor_of(family))
    batch, measured = collator([sample]), collator.measure(sample)
    assert all(audio.pixels is None for audio in measured.audios)
    tokenized = {name: value[0] if name in ("input_ids", "attention_mask") else value for name, value in made.items()}
    for other in (collator.decode([measured]).to_hf(), collator([tokenized])):
        assert all(torch.equal(other[name], batch[name]) for name in batch if name != "vlmpack")
    assert measure_lengths([sample], collator).tokens.tolist() == [batch["input_ids"].shape[1]]


@each_family
def test_a_video_is_written_where_the_whole_processor_writes_it(family: str) -> None:
    """Its patches are those of Qwen2-VL's video processor, which `test_video_files` compares."""
    processor, clip = copy.copy(processor_of(family)), {"type": "video", "video": [picture()] * 4, "sample_fps": 1.0}
    batch = VLMCollator(processor)([{"messages": messages(clip, heard(9_000))}])

    class Clips:
        temporal_patch_size, merge_size = 2, processor.image_processor.merge_size

        def __call__(self, videos: Any, **_: Any) -> dict[str, Any]:
            return {name: batch[name] for name in ("pixel_values_videos", "video_grid_thw")}

    processor.video_processor = Clips()
    text = processor.apply_chat_template(messages({"type": "video"}, {"type": "audio"}), tokenize=False)
    frames = [np.zeros((4, 120, 90, 3), np.uint8)]
    made = processor(text=[text], videos=frames, audio=[sound(9_000)], fps=1.0, return_tensors="pt")
    assert torch.equal(batch["input_ids"], made["input_ids"])
    assert batch["video_second_per_grid"].tolist() == [float(s) for s in made["video_second_per_grid"]] == [2.0]


@pytest.mark.parametrize(
    "audio",
    [
        {"audio": {"array": sound(9_000), "sampling_rate": RATE}},
        {"audio": sound(9_000).tolist()},
        {"audio": torch.from_numpy(sound(9_000))},
        {"audio": sound(9_000).astype(np.float64), "sampling_rate": RATE},
    ],
    ids=["as datasets.Audio decodes it", "list", "tensor", "double, with its rate"],
)
def test_arrays_of_every_kind_are_the_same_audio(audio: dict[str, Any]) -> None:
    collator = VLMCollator(processor_of(POOLED))
    expected, found = (collator([{"messages": messages(part)}]) for part in (heard(9_000), {"type": "audio", **audio}))
    assert torch.equal(found["input_ids"], expected["input_ids"])
    assert torch.equal(found["input_features"], expected["input_features"])


def wav(array: np.ndarray, *, rate: int = RATE) -> bytes:
    """[n, channels] of 16-bit numbers in a file."""
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setparams((array.shape[1], 2, rate, 0, "NONE", ""))
        file.writeframes(array.astype("<i2").tobytes())
    return buffer.getvalue()


def titled(data: bytes) -> bytes:
    """The file with a title that is not UTF-8."""
    chunk = b"LIST\x10\0\0\0INFOINAM\x04\0\0\0\xe9\xe8\xff\0"
    return data[:4] + (len(data) + len(chunk) - 8).to_bytes(4, "little") + data[8:12] + chunk + data[12:]


def test_a_file_is_the_audio_that_its_numbers_are(tmp_path: Path) -> None:
    """Two channels are averaged, and another rate is resampled."""
    pytest.importorskip("av", reason="waits for PyAV (extra [video])")
    levels = (sound(9_000) * 32768).round().clip(-32768, 32767)
    collator = VLMCollator(processor_of(POOLED))
    expected = collator([{"messages": messages({"type": "audio", "audio": levels.astype(np.float32) / 32768})}])
    (tmp_path / "dog.wav").write_bytes(data := wav(levels[:, None]))
    (tmp_path / "two.wav").write_bytes(wav(np.stack([levels, levels], 1)))
    row = {"messages": messages({"type": "audio"}), "audio": "dog.wav"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    for source in (data, str(tmp_path / "two.wav"), {"bytes": data, "path": None}, titled(data)):
        found = collator([{"messages": messages({"type": "audio", "audio": source})}])
        assert torch.equal(found["input_features"], expected["input_features"])
    assert torch.equal(collator([open_dataset(tmp_path / "rows.jsonl")[0]])["input_ids"], expected["input_ids"])
    slow = {"type": "audio", "audio": wav(levels[:, None], rate=RATE // 2)}
    assert collator.measure({"messages": messages(slow)}).audios[0].runs == (
        collator.measure({"messages": messages(heard(18_000))}).audios[0].runs
    )


REFUSED = {
    "no file": (messages({"type": "audio", "audio": "a.wav"}), "audio_missing", "there is no audio file at 'a.wav'"),
    "no audio": (
        messages({"type": "audio", "audio": b"RIFF"}),
        "audio_undecodable",
        "audio 0: the audio cannot be dec",
    ),
    "a number": (messages({"type": "audio", "audio": 5}), "audio_source", "audio 0 is a int; give a file, an array"),
    "two channels": (
        messages({"type": "audio", "audio": sound(9_000).reshape(2, -1)}),
        "audio_source",
        r"float32 \[2, 4500\]; it must be finite floats \[n\] of one channel",
    ),
    "whole numbers": (messages({"type": "audio", "audio": np.arange(9_000)}), "audio_source", "int64"),
    "samples of 16 bits": (
        messages({"type": "audio", "audio": sound(9_000) * 32768}),
        "audio_source",
        "has values up to .*, beyond -1 ... 1; divide 16-bit by 32768",
    ),
    "another rate": (
        messages({"type": "audio", "audio": {"array": sound(9_000), "sampling_rate": 8_000}}),
        "audio_rate",
        "has a sampling rate of 8000, but its processor takes 16000",
    ),
    "too long": (messages(heard(9 * RATE)), "audio_too_long", "lasts 9.0 s, but the processor cuts off what is"),
    "too short": (messages(heard(300)), "audio_source", "has 300 samples, too few for one token"),
    "no source": (messages({"type": "audio"}), "media_count_mismatch", "1 audio placeholder"),
    "a reserved token": (messages(text("<|AUDIO|>")), "reserved_token_in_text", r"its text holds '<\|AUDIO\|>'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_heard_is_refused_by_sample(case: str) -> None:
    turns, reason, words = REFUSED[case]
    with pytest.raises(SampleError, match=rf"sample 1 \(id 'b'\): .*{words}") as caught:
        VLMCollator(processor_of(POOLED)).collate(
            [{"messages": messages(heard(9_000)), "id": "a"}, {"messages": turns, "id": "b"}]
        )
    assert caught.value.reason == reason


@pytest.mark.parametrize("samples", [400, 15_999, 16_000, 16_001, 16_159, 127_999, 128_000])
def test_audio_of_every_length_is_what_the_whole_processor_makes(samples: int) -> None:
    """It computes silence up to the most that it takes, of which the collator computes no more than frames read."""
    processor, part = processor_of(POOLED), heard(samples, seed=4)
    text = processor.apply_chat_template(messages({"type": "audio"}), tokenize=False)
    made = processor(text=[text], audio=[part["audio"]], return_tensors="pt")
    batch, mask = VLMCollator(processor)([{"messages": messages(part)}]), made["feature_attention_mask"][0].bool()
    assert torch.equal(batch["input_ids"], made["input_ids"])
    assert torch.equal(batch["input_features"][0], made["input_features"][0][:, mask])


@pytest.mark.parametrize("way", ["collate", "measure"])
def test_audio_that_is_too_short_for_the_spectrum_of_a_call_is_refused(way: str) -> None:
    """The processor mirrors 200 values of its longest audio; a short one beside a longer one is read."""
    collator = VLMCollator(processor_of(CONVOLVED))
    call = collator.measure if way == "measure" else lambda sample: collator.collate([sample])
    with pytest.raises(SampleError, match=r"audio 0, the longest, has 200 samples, but .* takes 201; lengthen it"):
        call({"messages": messages(heard(200))})
    call({"messages": messages(heard(201))})
    call({"messages": messages(heard(200), heard(201))})


def test_longer_audio_is_no_fault_where_the_processor_cuts_nothing_off() -> None:
    batch = VLMCollator(processor_of(CONVOLVED))([{"messages": messages(heard(9 * RATE))}])
    assert tuple(audio.frames for audio in batch["vlmpack"].media.audios) == (900,)


def test_tokenized_samples_whose_audio_does_not_fit_are_refused() -> None:
    _, made = whole(POOLED)
    collator = VLMCollator(processor_of(POOLED))
    sample = {name: value[0] if name in ("input_ids", "attention_mask") else value for name, value in made.items()}

    def refused(words: str, **changes: Any) -> None:
        with pytest.raises(SampleError, match=words):
            collator([sample | changes])

    refused("input_features alone", feature_attention_mask=None)
    refused(r"input_features is torch.float32 \[6, 800\]", input_features=sample["input_features"][0])
    refused(
        r"its runs of audio tokens are \[50, 14\] long but its processor writes \[50\] for its 1 audio",
        input_features=sample["input_features"][:1],
        feature_attention_mask=sample["feature_attention_mask"][:1],
    )
    refused("but no audio frames; add input_features", input_features=None, feature_attention_mask=None)


def test_models_that_cannot_hear_refuse_audio_and_stored_rows_refuse_models_that_can() -> None:
    with pytest.raises(SampleError, match="is of type 'audio'; only text, image and video parts can be used"):
        VLMCollator(tiny_processor("qwen3_vl")).collate([{"messages": messages(heard(9_000))}])
    with pytest.raises(ConfigError, match=r"samples of a Qwen2_5OmniProcessor may have audio"):
        measure_lengths([whole(POOLED)[0]], VLMCollator(processor_of(POOLED)), min_shared=8)


@pytest.mark.parametrize("family", slow(POOLED, CONVOLVED))
def test_a_processor_that_was_saved_makes_the_same_batch(family: str, tmp_path: Any) -> None:
    sample, made = whole(family)
    processor_of(family).save_pretrained(tmp_path)
    check_equal(VLMCollator(load_processor(tmp_path))([sample]), made)
    whole_model = {POOLED: Qwen2_5OmniConfig, CONVOLVED: Qwen3OmniMoeConfig}[family]
    whole_model().save_pretrained(tmp_path)  # as in the released checkpoints, which hold the talker too
    for loaded in (load_processor(tmp_path), named_processor(str(tmp_path))):
        check_equal(VLMCollator(loaded)([sample]), made)


def test_a_measured_sample_whose_longest_audio_was_cut_off_is_decoded_as_it_is_collated() -> None:
    """Its processor pads audios to the longest of the sample, which their last frames show."""
    feature = {"messages": messages(heard(9_010), heard(16_000, seed=1))}
    types = VLMCollator(processor_of(CONVOLVED))([feature])["mm_token_type_ids"][0]
    within = int((types == AUDIO).nonzero()[-1])
    collator = VLMCollator(processor_of(CONVOLVED), max_length=within, overlength="truncate", train_on="all")
    batch, decoded = collator([feature]), collator.decode([collator.measure(feature)]).to_hf()
    assert tuple(audio.frames for audio in batch["vlmpack"].media.audios) == (57,)
    assert all(torch.equal(decoded[name], batch[name]) for name in batch if name != "vlmpack")
    shorter = VLMCollator(processor_of(CONVOLVED))([{"messages": messages(heard(9_010))}])
    assert shorter["vlmpack"].media.audios[0].frames == 56  # so the processor does


# ---------------------------------------------------------------------- places of audio in texts

PART = {"type": "audio"}
SPOKEN = (
    ("What is <audio>, please?", ["What is ", PART, ", please?"]),
    ("<audio> or <audio>?", [PART, " or ", PART, "?"]),
)


@pytest.mark.parametrize(("text", "parts"), SPOKEN)
def test_audio_stands_where_its_marker_stands(text: str, parts: list[Any]) -> None:
    collator, sounds = VLMCollator(processor_of(CONVOLVED)), [sound(9_000), sound(4_000, seed=1)][: text.count("<")]
    say = says("A dog.")
    content = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    written = collator.processor.apply_chat_template([user(content), say], tokenize=False)
    plain = collator.processor(text=[written], audio=sounds, return_tensors="pt")["input_ids"]
    for content in (text, [{"type": "text", "text": text}]):
        turns = [user(content), say]
        for sample in (
            {"messages": turns, "audios": sounds},
            {"messages": turns, "audio": sounds},
            {"prompt": turns[:1], "completion": turns[1:], "audios": sounds},
        ):
            assert torch.equal(collator.collate([sample]).input_ids, plain)
            assert torch.equal(torch.from_numpy(collator.measure(sample).input_ids), plain[0])
