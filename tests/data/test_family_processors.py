"""Processors beyond Qwen's: saved and loaded without torchvision, with all their settings."""

import pickle

import pytest
from chats import BEYOND, CHATTING, SHOWN, picture
from fixtures.processors import build_processor, missing_packages
from tiers import tiers

from vlmpack.collate import VLMCollator
from vlmpack.data import load_processor, save_processor
from vlmpack.errors import FamilyError
from vlmpack.testing import tiny_processor

pytestmark = pytest.mark.every_family


def sample_of(family):
    marker = "<image>"
    if family not in CHATTING:
        return {"prompt": f"{marker}Total?", "completion": "5", "images": [picture(90, 61)]}
    content = [{"type": "image", "image": picture(90, 61)}, {"type": "text", "text": "Total?"}]
    return {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": "5"}]}


def same_batches(ours, theirs):
    assert sorted(ours) == sorted(theirs)
    tensors = [name for name in ours if name != "vlmpack"]
    assert tensors
    assert all(ours[name].tolist() == theirs[name].tolist() for name in tensors)


@pytest.mark.parametrize("family", tiers(BEYOND, SHOWN))
@pytest.mark.parametrize("way", ["save_processor", "save_pretrained"])
def test_a_saved_processor_is_loaded_with_its_settings(family, way, tmp_path):
    processor = tiny_processor(family)
    if way == "save_processor":
        save_processor(processor, tmp_path)
    else:
        processor.save_pretrained(tmp_path)
    loaded = load_processor(tmp_path)
    assert type(loaded) is type(processor)
    assert loaded.chat_template == processor.chat_template
    same_batches(VLMCollator(loaded)([sample_of(family)]), VLMCollator(processor)([sample_of(family)]))


@pytest.mark.parametrize("family", tiers(BEYOND, SHOWN))
def test_a_processor_and_its_collator_reach_a_worker(family):
    collator = VLMCollator(tiny_processor(family))
    copied = pickle.loads(pickle.dumps(collator))
    same_batches(copied([sample_of(family)]), collator([sample_of(family)]))


def test_a_processor_that_needs_a_package_is_refused_by_its_name(hide_package):
    hide_package("torchvision")
    missing_packages.cache_clear()
    try:
        with pytest.raises(FamilyError, match="the processor of cohere2_vision needs torchvision; install it"):
            build_processor("cohere2_vision", 800)
    finally:
        missing_packages.cache_clear()


@pytest.mark.skipif(not missing_packages("cohere2_vision"), reason="torchvision is installed")
def test_a_saved_processor_that_needs_torchvision_is_refused_without(tmp_path):
    """Of another family, whose files name classes that exist for torchvision only."""
    save_processor(tiny_processor("aya_vision"), tmp_path)
    names = {"AyaVisionProcessor": "Cohere2VisionProcessor", "GotOcr2ImageProcessor": "Cohere2VisionImageProcessor"}
    for file in tmp_path.glob("*_config.json"):
        text = file.read_text()
        for before, after in names.items():
            text = text.replace(before, after)
        file.write_text(text)
    with pytest.raises(FamilyError, match="needs torchvision, even for images; install it"):
        load_processor(tmp_path)
