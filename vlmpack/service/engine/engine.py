"""The engine: one base model, any number of client models over it, and the operations that clients request.

The engine knows requests and results, but no HTTP and no queue. Any thread may call `encode`, `encode_prompt`,
`encode_chunks` and `measure`; only the one thread that owns the model may call anything else.
"""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, final

from torch import nn

from vlmpack.collate.processor_metadata import parts_of
from vlmpack.context_parallel.mesh import Parallel
from vlmpack.errors import ConfigError, FamilyError, RequestError
from vlmpack.families.registry import family_of
from vlmpack.layout.sharing import MIN_SHARED
from vlmpack.model.enable import enable_packing
from vlmpack.model.engine import StepConfig, packing_state
from vlmpack.service.engine.batch_invariant import BatchInvariant, check
from vlmpack.service.engine.clients import Adapter, Adapters, ClientModel, new_adapter, read_settings
from vlmpack.service.engine.datums import EncodedRequest, Encoder, not_served
from vlmpack.service.engine.rows import RowWork
from vlmpack.service.limits import ServiceLimits
from vlmpack.service.ranks import Ranks, Sharding
from vlmpack.service.wire.messages import AdamParams, LoraConfig


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Settings of an engine."""

    limits: ServiceLimits = field(default_factory=ServiceLimits)
    """Limits of the service."""
    lora_only: bool = False
    """Refuse to train all weights of a model."""
    gradient_checkpointing: bool = False
    """Recompute layers in the backward pass instead of keeping their activations."""
    min_shared: int | None = MIN_SHARED
    """Minimum number of tokens of a prefix that is computed only once for the datums of a row that share it (prefix
    tree); None: prefixes are not shared. They are never shared with a sharded base model."""
    batch_invariant: bool = False
    """Make log-probabilities of sampled tokens bit-equal to those of training; on a CPU."""
    shard_on: str | None = None
    """Shard the base model over the ranks, on devices of this type (FSDP2); None: each rank holds the full model."""


@final
@dataclass(frozen=True, kw_only=True)
class BaseModel:
    """The base model as clients and sampling engines see it."""

    name: str
    """Name of the model."""
    arch: str
    """Family of the model (`config.model_type`)."""
    tokenizer_id: str
    """Where the client's `AutoTokenizer` finds the tokenizer: a folder or a hub name."""
    max_context: int
    """Maximum number of tokens of a datum."""
    is_vision: bool
    """Whether the model takes images."""
    eos: tuple[int, ...]
    """Ids that end a sequence, unless a request has an empty `stop` list."""
    decode: Callable[[Sequence[int]], str]
    """Converts token ids to text, special tokens included."""


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Weights:
    """Weights to sample from: the base model's, or those of a snapshot, which later training does not change."""

    model: nn.Module
    """The module to call, inside `applied`."""
    adapter: Adapter | None
    """The adapter; None: there is none."""
    engine: Engine
    """The engine. If its base model is sharded, every rank makes the same calls."""

    @contextmanager
    def applied(self) -> Iterator[nn.Module]:
        """Yield the module. Calls inside the block compute with these weights, whatever their shapes."""
        sharding = self.engine.sharding
        with nullcontext() if sharding is None else sharding.passes(), self.engine.adapters.applied(self.adapter):
            yield self.model


@final
class Engine:
    """Client models over one base model."""

    def __init__(
        self,
        model: nn.Module,
        processor: Any,
        *,
        name: str,
        tokenizer_id: str,
        config: EngineConfig | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        """Take over a model: freeze it, enable packing on it in place, and switch dropout off.

        Args:
            model: a `...ForConditionalGeneration` or `...ForCausalLM` on its device, or on the CPU if it is to be
                sharded.
            processor: the model's processor; for a text model, its tokenizer.
            name: the name that clients use.
            tokenizer_id: where clients find the tokenizer.
            config: settings; None: the defaults.
            ranks: the process group that computes rows together, in which every rank makes the same calls; None: this
                process runs alone.

        Raises:
            FamilyError: the model's family cannot be packed exactly, or has no batch-invariant form.
            ConfigError: the model is to be sharded, but there is only one rank; or it is to be batch-invariant, which
                this machine's kernels are not.
        """
        self.config = config or EngineConfig()
        family = family_of(model)
        if (reason := not_served(family)) is not None:
            raise FamilyError(f"{family.model_type}: {reason}")
        is_sharded = self.config.shard_on is not None
        if is_sharded and ranks is None:
            raise ConfigError("--shard: a base model is sharded over several ranks; add --workers or use torchrun")
        self.model: Any = enable_packing(model, parallel=Parallel() if is_sharded else None)
        """The base model."""
        self.family = family_of(self.model)
        """Family of the base model."""
        self._freeze()
        self.adapters = Adapters(
            self.model, self.family, mode=BatchInvariant() if self.config.batch_invariant else None
        )
        """The hooks on the base model."""
        self.ranks = ranks
        """The process group that computes rows together; None: this process runs alone."""
        self.sharding: Sharding | None = None
        """Sharding of the base model; None: this rank holds the full model."""
        if ranks is not None and self.config.shard_on is not None:
            self.sharding = Sharding(self.model, self.family, ranks, device=self.config.shard_on)
        self.min_shared = self.config.min_shared if self.sharding is None else None
        """Minimum number of tokens of a prefix that is computed only once; None: prefixes are not shared."""
        self.has_pieces = ranks is None and packing_state(self.model).problem_of_pieces(self.model) is None
        """Whether the model computes a row above the token budget in pieces."""
        if self.has_pieces:
            enable_packing(self.model, StepConfig(capacity=self.config.limits.row_tokens))
        self._processor = processor
        names = ("rows_total", "trained_tokens_total", "computed_tokens_total", "patches_total")
        self.counts: Counter[str] = Counter(dict.fromkeys(names, 0))
        """Counts of the rows computed since the engine started, see `status.METRICS`."""
        self._clients: dict[str, ClientModel] = {}
        text, limits = self.family.text_config(self.model.config), self.config.limits
        context = min(limits.context or text.max_position_embeddings, text.max_position_embeddings)
        tokenizer = parts_of(processor).tokenizer
        self.base = BaseModel(
            name=name,
            arch=self.family.model_type,
            tokenizer_id=tokenizer_id,
            max_context=context,
            is_vision=self.family.has_vision,
            eos=_eos(self.model, tokenizer),
            decode=partial(tokenizer.decode, skip_special_tokens=False, clean_up_tokenization_spaces=False),
        )
        """The base model as clients and sampling engines see it."""
        encoder = Encoder(self.family, self.model.config, processor, context=context, limits=limits)
        self.encode, self.encode_prompt = encoder.encode, encoder.encode_prompt
        self.encode_chunks, self.measure = encoder.encode_chunks, encoder.check_chunks
        """Check the chunks that clients send and cut images into patches. Safe to call from any thread."""
        if self.config.batch_invariant:
            check(self.model, self.family, context=context, is_sharded=is_sharded)

    # ------------------------------------------------------------------ models

    def models(self) -> tuple[str, ...]:
        """Return the ids of the client models."""
        return tuple(self._clients)

    def client(self, model_id: str) -> ClientModel:
        """Return the weights, gradient and optimizer of a client model.

        Raises:
            RequestError: there is no such model.
        """
        if model_id not in self._clients:
            raise RequestError(f"there is no model {model_id!r:.80} here; create it first")
        return self._clients[model_id]

    def create(self, model_id: str, lora: LoraConfig | None) -> None:
        """Create a client model.

        Raises:
            RequestError: the rank or the targets are invalid, there are too many models, or `lora` is None and this
                service does not train all weights.
        """
        self._clients[model_id] = self._new(lora)

    def create_from(self, model_id: str, folder: Path, *, optimizer: bool) -> LoraConfig | None:
        """Create a client model from a checkpoint, with the checkpoint's LoRA settings, and return these settings.

        Raises:
            RequestError: the checkpoint cannot be used.
        """
        lora = read_settings(folder, model_type=self.base.arch)
        client = self._new(lora)
        client.load(folder, optimizer=optimizer)
        self._clients[model_id] = client
        return lora

    def free(self, model_id: str) -> None:
        """Remove a client model, if it exists."""
        self._clients.pop(model_id, None)

    def save(self, model_id: str, folder: Path, *, optimizer: bool) -> None:
        """Write a client model into an existing empty folder. Accumulated gradients are not saved."""
        client = self.client(model_id)
        client.save(folder, optimizer=optimizer, base_name=self.base.name, model_type=self.base.arch)

    def export(self, model_id: str, folder: Path) -> None:
        """Export a client model into an existing empty folder.

        An adapter is written in PEFT's format; a model trained as a whole in transformers' format, with its processor.
        """
        client = self.client(model_id)
        model: Any = client.model
        if client.adapter is not None:
            client.adapter.save(folder, base_name=self.base.name)
        else:
            model.save_pretrained(folder)
            self._processor.save_pretrained(folder)

    def load(self, model_id: str, folder: Path, *, optimizer: bool) -> None:
        """Load a checkpoint into a client model. Accumulated gradients are dropped.

        Args:
            model_id: id of the model.
            folder: a folder that `save` wrote.
            optimizer: load moments and step counts too; False: reset the optimizer.

        Raises:
            RequestError: the checkpoint is missing or damaged, or has another rank or other targets.
        """
        client = self.client(model_id)
        lora = read_settings(folder, model_type=self.base.arch)
        if (lora is None) != (client.lora is None):
            raise RequestError("one of the checkpoint and the model is an adapter, the other is trained as a whole")
        client.load(folder, optimizer=optimizer)

    # ------------------------------------------------------------------ training

    def forward_backward(self, requests: Sequence[EncodedRequest]) -> RowWork:
        """Plan the packed rows of requests of one model that run together: all up to its next barrier."""
        return RowWork(self.client(requests[0].model_id), requests, self)

    def optim_step(self, model_id: str, adam: AdamParams) -> dict[str, float]:
        """Take a step with the accumulated gradient, clear it, and return metrics.

        Without a gradient nothing changes, and the metrics say so.

        Raises:
            RequestError: the gradient is not finite. It is dropped, and no step is taken.
        """
        return self.client(model_id).step(adam)

    def open_weights(self, folder: Path | None) -> Weights:
        """Load weights to sample from: a saved model, or the base model (None).

        The weights are freed with the returned object. If the base model is sharded, every rank must make this call.

        Raises:
            RequestError: the saved model cannot be read, or was deleted.
        """
        open_here = partial(self._open_weights, folder)
        if self.sharding is None or self.ranks is None:
            return open_here()
        return self.ranks.together(open_here, name="open_weights")

    # ------------------------------------------------------------------ inside

    def _open_weights(self, folder: Path | None) -> Weights:
        if folder is None:
            return Weights(model=self.model, adapter=None, engine=self)
        if not folder.is_dir():
            raise RequestError(f"the snapshot {folder.name!r} was deleted; sample from another one")
        lora = read_settings(folder, model_type=self.base.arch)
        client = self._whole() if lora is None else self._adapted(lora)
        client.load(folder, optimizer=False)
        for parameter in client.parameters:
            parameter.requires_grad_(False)
        return Weights(model=client.model, adapter=client.adapter, engine=self)

    def _new(self, lora: LoraConfig | None) -> ClientModel:
        if len(self._clients) >= self.config.limits.models:
            raise RequestError(f"there are {len(self._clients)} models, as many as this server has; finish sessions")
        if lora is None:
            if self.config.lora_only:
                raise RequestError("this server trains LoRA adapters only; send a lora_config")
            return self._whole()
        if not 1 <= lora.rank <= self.config.limits.rank:
            raise RequestError(f"lora_config: rank is {lora.rank}; it is a number from 1 to {self.config.limits.rank}")
        return self._adapted(lora)

    def _whole(self) -> ClientModel:
        """Return a copy of the base model that is trained as a whole."""
        if self.sharding is not None:
            raise RequestError("a sharded base model trains LoRA adapters only; send a lora_config")
        return ClientModel(copy.deepcopy(self.model).requires_grad_(True), None)

    def _adapted(self, lora: LoraConfig) -> ClientModel:
        return ClientModel(self.model, new_adapter(lora, self.adapters.targets, self.model))

    def _freeze(self) -> None:
        self.model.requires_grad_(False)
        self.model.eval()
        if self.config.gradient_checkpointing:  # only for layers in training mode, see rows.py
            with warnings.catch_warnings():
                # the FutureWarning announces a new name in transformers 6, which 5.17 does not have yet
                warnings.filterwarnings("ignore", message=".*gradient_checkpointing_enable", category=FutureWarning)
                self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            self.model.disable_input_require_grads()  # otherwise the vision tower would run a useless backward pass


def _eos(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """Return the ids that end a sequence, from the generation configuration and the tokenizer."""
    ids = model.generation_config.eos_token_id
    listed = ids if isinstance(ids, list) else [ids]
    return tuple(dict.fromkeys(int(i) for i in (*listed, tokenizer.eos_token_id) if i is not None))
