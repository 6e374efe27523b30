"""What the collator writes is what each family was made for: collated and packed, samples are computed as alone."""

import pytest
import torch
from chats import FAMILIES, chat, picture, processor_of
from equality import by_sample, limits_of

from vlmpack.collate import VLMCollator
from vlmpack.families import family_of
from vlmpack.layout import METADATA_KEY
from vlmpack.model import PackedStep
from vlmpack.testing import tiny_model

SAMPLES = 4


def features():
    """Two images, text, a video of five frames, and a video and an image."""
    film = {"type": "video", "video": [picture(64, 64, seed=i) for i in range(5)], "sample_fps": 4.0}
    turns = [
        [film, {"type": "text", "text": "What happens?"}],
        [film, {"type": "image", "image": picture(90, 61)}, {"type": "text", "text": "And here?"}],
    ]
    answer = {"role": "assistant", "content": "Nothing"}
    films = [{"messages": [{"role": "user", "content": parts}, answer]} for parts in turns]
    return [chat("Total?", "75,000", picture(90, 61, seed=1), picture(40, 70)), chat("2 + 2?", "4"), *films]


@pytest.mark.parametrize("family", FAMILIES)
def test_collated_samples_are_placed_and_computed_as_alone(family):
    processor = processor_of(family)
    model = tiny_model(family, seed=3, processor=processor).eval()
    row = VLMCollator(processor, layout="packed").collate(features())
    assert row.metadata.videos_per_sample == (0, 0, 1, 1)
    assert row.metadata.images_per_sample == (2, 0, 0, 1)
    found = family_of(model).positions(
        row.mm_token_type_ids,
        row.segments,
        config=model.config,
        image_grids=row.metadata.image_grids,
        video_grids=row.metadata.video_grids,
        seconds_per_grid=row.metadata.seconds_per_grid,
    )
    alone = [VLMCollator(processor)([sample]) for sample in features()]
    assert len(alone) == SAMPLES
    logits = []
    for batch, (start, stop) in zip(alone, row.segments.spans, strict=True):
        del batch[METADATA_KEY]
        tensors = {name: value for name, value in batch.items() if name not in ("labels", "attention_mask")}
        media = {name: value for name, value in tensors.items() if not name.startswith("pixel_values")}
        assert torch.equal(found[1:, 0, start:stop], model.model.get_rope_index(**media)[0][:, 0])
        with torch.no_grad():
            logits.append(model(**tensors).logits[0])
    with torch.no_grad():
        packed = by_sample(PackedStep(model)(row, logits=True))
    for own, ours in zip(logits, packed, strict=True):
        assert (ours - own).abs().max() <= limits_of(family).logits


@pytest.mark.parametrize("family", [family for family in FAMILIES if family.startswith("qwen3")])
def test_from_qwen3_on_every_two_frames_have_their_time(family):
    processor = processor_of(family)
    row = VLMCollator(processor, layout="packed").collate(features()[2:3])
    text = processor.tokenizer.decode(row.input_ids[0])
    assert [time in text for time in ("<0.1 seconds>", "<0.6 seconds>", "<1.1 seconds>")] == [True] * 3
    assert text.count("seconds>") == 3
