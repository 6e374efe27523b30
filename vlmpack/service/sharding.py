"""A base model whose weights are sharded over the ranks (FSDP2): each keeps its part of every layer.

    layer       0    1    2              a rank that computes a layer gathers it first, and frees it after
    rank 0      #    #    #              own rows, same layers:   row 0   row 2   (idle)
    rank 1       #    #    #                                      row 1   row 3   row 4

So all ranks run the same passes in the same order: forward, and backward if every rank has one. A rank without a row
runs an idle one, of one token that does not count. Adapters are not sharded: they are small, and every rank has them.

An error in the midst of a pass leaves the others waiting for the rank that raised it, so that the service ends; its
state is on the disk.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, final

import numpy as np
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from vlmpack.errors import ConfigError, RequestError, VlmpackError
from vlmpack.families.family import Family
from vlmpack.service.datums import EncodedDatum, EncodedSequence
from vlmpack.service.losses import TARGETS, bind_loss
from vlmpack.service.ranks import FAILED, Ranks, end
from vlmpack.service.rows import RowItem

log = logging.getLogger("vlmpack.service")

LEAST_TORCH = (2, 13)
"""The first PyTorch whose FSDP2 can forget a forward pass without a backward pass."""


@final
class Sharding:
    """The sharded base model of this rank."""

    def __init__(self, model: Any, family: Family, ranks: Ranks, *, device: str) -> None:
        """Shard a model in place, layer by layer, and move it to its device.

        Args:
            model: frozen, with packing enabled for several ranks.
            family: of the model.
            ranks: over which it is sharded.
            device: type of the ranks' devices.

        Raises:
            ConfigError: PyTorch is too old.
        """
        if tuple(int(part) for part in torch.__version__.split(".")[:2]) < LEAST_TORCH:
            least = ".".join(map(str, LEAST_TORCH))
            raise ConfigError(f"--shard needs PyTorch {least} or newer, not {torch.__version__}; leave it out")
        # in-place changes of a pass's outputs would be wrong; nothing here makes any
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view", category=UserWarning)
        self._model, self._ranks = model, ranks
        mesh = init_device_mesh(device, (ranks.size,))
        for part in (*_blocks(model, family), model):
            fully_shard(part, mesh=mesh)

    @contextmanager
    def passes(self) -> Iterator[None]:
        """Passes that all ranks run alike; what FSDP2 keeps of a forward pass without a backward pass is freed.

        An error other than of the library's own, which every rank raises before its passes, ends the process.
        """
        try:
            yield
        except VlmpackError:
            raise
        except Exception:
            log.exception("rank %d failed amid a pass that all ranks run, so the service ends", self._ranks.rank)
            end(FAILED)
        self._model.reset_iter_state()

    def all_agree(self, value: bool) -> bool:
        """Return whether `value` is true on every rank."""
        return all(self._ranks.gather(value))

    @staticmethod
    def refuse_whole() -> None:
        """Refuse a model that is trained as a whole.

        Raises:
            RequestError: always.
        """
        raise RequestError(
            "the base model of this server is sharded over several ranks, so that it trains LoRA adapters only; send a "
            "lora_config"
        )


def idle_item(like: RowItem) -> RowItem:
    """The only item of a row that computes nothing that counts, for the adapter of another item."""
    inputs = {TARGETS: np.zeros(1, np.int64), "weights": np.zeros(1, np.float32)}
    datum = EncodedDatum(sequence=EncodedSequence(input_ids=np.zeros(1, np.int64)), inputs=inputs)
    return RowItem(client=like.client, datum=datum, loss=bind_loss("cross_entropy", {}))


def _blocks(model: Any, family: Family) -> Iterator[Any]:
    """Layers of the text model, and blocks of the vision tower."""
    yield from family.language_model(model).get_submodule("layers").children()
    yield from family.vision_blocks(model)
