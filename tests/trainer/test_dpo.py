"""TRL's DPOTrainer on an enabled model: what it computes on the plain one, with all its padding."""

from __future__ import annotations

import pytest
from chats import picture
from training import distance
from trl_runs import arguments, finish, processor_of, saved, trl

from vlmpack.errors import ConfigError
from vlmpack.model import enable_packing
from vlmpack.trainer import check_trainer

pytestmark = [
    pytest.mark.full,
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:nothing is packed in this training step:UserWarning"),  # once a process
]


def preferences():
    """Four questions about pictures of unlike size, each with a better and a worse answer."""
    from datasets import Dataset

    samples = []
    for n in range(4):
        question = [{"role": "user", "content": "What is the total? " * (1 + n % 2)}]
        better = [{"role": "assistant", "content": "The total is 75,000. " * (1 + n % 3)}]
        worse = [{"role": "assistant", "content": "It is nothing."}]
        pictures = [picture(64 + 32 * n, 64, seed=n)]
        samples.append({"prompt": question, "images": pictures, "chosen": better, "rejected": worse})
    return Dataset.from_list(samples)


def dpo(model, tmp_path, **settings):
    args = arguments("DPOConfig", tmp_path, per_device_train_batch_size=2, **settings)
    return trl.DPOTrainer(model, args=args, train_dataset=preferences(), processing_class=processor_of())


@pytest.mark.parametrize("loss_type", ["sigmoid", "ipo"])
def test_losses_gradients_and_weights_are_those_without_packing(loss_type, tmp_path):
    plain, reference = finish(dpo(saved(tmp_path), tmp_path, loss_type=loss_type))
    run = dpo(enable_packing(saved(tmp_path)), tmp_path, loss_type=loss_type)
    ours, weights = finish(run)
    assert ours.losses == plain.losses
    assert len(plain.gradients) == 3
    for truth, gradients in zip(plain.gradients, ours.gradients, strict=True):
        assert max(float(gradient.abs().max()) for gradient in truth.values()) > 1e-3
        assert distance(truth, gradients) == 0
    assert distance(reference, weights) == 0


def test_the_check_of_settings_names_it(tmp_path):
    with pytest.raises(ConfigError, match=r"TRL's DPOTrainer computes the loss itself.*nothing of it is packed"):
        check_trainer(dpo(enable_packing(saved(tmp_path)), tmp_path))
