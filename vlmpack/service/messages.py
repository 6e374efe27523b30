"""Requests of clients and their results, as every part of the service has them; numpy, never torch.

    operations of a model, in the order of their seq_id        a model's first operation, without one
    ├─ ForwardBackward   gradients, or log-probabilities alone  ├─ CreateModel
    ├─ OptimStep         one step of AdamW                      └─ CreateFromCheckpoint
    ├─ SaveWeights       a training checkpoint
    ├─ SaveForSampler    an immutable snapshot to sample from   Sample: an operation of a sampling session
    ├─ SaveExternal      files to download
    └─ LoadWeights       back from a checkpoint

A datum has N tokens: those of its text chunks, and as many for each image as the model's processor makes of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, final

import numpy as np

from vlmpack.errors import RequestError

# ---------------------------------------------------------------------- what a model reads


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class TextChunk:
    """A run of token ids."""

    tokens: np.ndarray
    """int32 [n]: ids as the client sent them, not yet checked against the vocabulary."""


@final
@dataclass(frozen=True, kw_only=True)
class ImageChunk:
    """The bytes of an image file."""

    data: bytes
    """PNG or JPEG."""
    format: str
    """"png" or "jpeg", as the client sent it."""
    expected_tokens: int | None = None
    """Tokens that the client counted; None: it did not."""


Chunk = TextChunk | ImageChunk


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class SparseMatrix:
    """The entries of a matrix [N, K] that are listed; all others are 0."""

    keys: np.ndarray
    """int64 [M]: row * K + column, increasing."""
    values: np.ndarray
    """[M]."""
    shape: tuple[int, int]
    """N, K."""


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Datum:
    """One sample of a training request."""

    chunks: tuple[Chunk, ...]
    """Text and images in order."""
    inputs: Mapping[str, np.ndarray | SparseMatrix] = field(default_factory=dict)
    """Inputs of the loss by name, such as `target_tokens` (int64) and `weights` (float32), with the shapes sent."""


# ---------------------------------------------------------------------- operations of a model


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class ForwardBackward:
    """Add the gradient of a loss over some datums, summed over their tokens; all of them or none."""

    model_id: str
    """Of the model."""
    seq_id: int
    """Place among the operations of its model, from 1."""
    data: tuple[Datum, ...]
    """The datums, one at least."""
    loss_fn: str
    """Name of the loss, not yet checked."""
    loss_config: Mapping[str, float | str] = field(default_factory=dict)
    """Settings of the loss."""
    forward_only: bool = False
    """Compute the loss and log-probabilities; add no gradient."""


@final
@dataclass(frozen=True, kw_only=True)
class AdamParams:
    """Settings of one step of AdamW, all of them finite."""

    learning_rate: float
    """Learning rate."""
    beta1: float
    """Decay of the first moment."""
    beta2: float
    """Decay of the second moment."""
    eps: float
    """Added to the square root of the second moment."""
    weight_decay: float
    """Decoupled decay."""
    grad_clip_norm: float
    """Largest norm of the whole gradient; 0: any."""


@final
@dataclass(frozen=True, kw_only=True)
class OptimStep:
    """Apply the accumulated gradient and clear it."""

    model_id: str
    """Of the model."""
    seq_id: int
    """Place among the operations of its model."""
    adam: AdamParams
    """Settings of this step."""


@final
@dataclass(frozen=True, kw_only=True)
class SaveWeights:
    """Save a training checkpoint: weights, moments, and what a model is created anew with."""

    model_id: str
    """Of the model."""
    seq_id: int
    """Place among the operations of its model."""
    name: str
    """Of the checkpoint."""
    overwrite: bool = False
    """Replace a checkpoint of this name."""
    user_metadata: Mapping[str, str] = field(default_factory=dict)
    """The client's own notes."""
    ttl_seconds: int | None = None
    """Seconds after which it is deleted; None: it stays."""


@final
@dataclass(frozen=True, kw_only=True)
class SaveForSampler:
    """Save an immutable snapshot of the weights to sample from."""

    model_id: str
    """Of the model."""
    seq_id: int
    """Place among the operations of its model."""
    name: str | None = None
    """Of a snapshot that stays; None: it belongs to a new sampling session."""
    sampling_session_seq_id: int | None = None
    """Number of that sampling session within its session; None with a name."""
    user_metadata: Mapping[str, str] = field(default_factory=dict)
    """The client's own notes."""
    ttl_seconds: int | None = None
    """Seconds after which a snapshot with a name is deleted; None: it stays."""


@final
@dataclass(frozen=True, kw_only=True)
class SaveExternal:
    """Save the weights for others than this service: an adapter as PEFT loads it, a model as transformers does."""

    model_id: str
    """Of the model."""
    seq_id: int
    """Place among the operations of its model."""
    name: str
    """Of the files."""
    user_metadata: Mapping[str, str] = field(default_factory=dict)
    """The client's own notes."""
    ttl_seconds: int | None = None
    """Seconds after which they are deleted; None: they stay."""


@final
@dataclass(frozen=True, kw_only=True)
class LoadWeights:
    """Go back to a training checkpoint; accumulated gradients are dropped."""

    model_id: str
    """Of the model."""
    seq_id: int
    """Place among the operations of its model."""
    path: str
    """`tinker://...` of the checkpoint."""
    optimizer: bool
    """Load moments and step count too; False: the optimiser starts anew."""


# ---------------------------------------------------------------------- new models


@final
@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Settings of a LoRA adapter."""

    rank: int
    """Rank of its matrices."""
    seed: int | None = None
    """Of its weights; None: random."""
    train_unembed: bool = True
    """Adapt the head."""
    train_mlp: bool = True
    """Adapt MLPs."""
    train_attn: bool = True
    """Adapt attention and gated delta layers."""


@final
@dataclass(frozen=True, kw_only=True)
class CreateModel:
    """Create a model of a session."""

    session_id: str
    """Of the session."""
    model_seq_id: int
    """Number of the model within its session, from 0."""
    base_model: str
    """Name of the base model."""
    lora: LoraConfig | None
    """Its adapter; None: all weights are trained."""
    user_metadata: Mapping[str, str] = field(default_factory=dict)
    """The client's own notes."""


@final
@dataclass(frozen=True, kw_only=True)
class CreateFromCheckpoint:
    """Create a model of a session from a training checkpoint, with its rank and targets."""

    session_id: str
    """Of the session."""
    model_seq_id: int
    """Number of the model within its session."""
    path: str
    """`tinker://...` of the checkpoint."""
    optimizer: bool
    """Load moments and step count too."""
    base_model: str | None = None
    """Name of the base model, which has to be the checkpoint's; None: the checkpoint's."""
    user_metadata: Mapping[str, str] = field(default_factory=dict)
    """The client's own notes."""


# ---------------------------------------------------------------------- sampling


@final
@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Settings of sampling, checked."""

    max_tokens: int | None = None
    """Most tokens of a sequence; None: up to the model's context."""
    seed: int | None = None
    """Of the first sequence; sequence i has seed + i. None: random."""
    temperature: float = 1.0
    """0: greedy."""
    top_k: int = -1
    """Most likely tokens to choose among; -1: all."""
    top_p: float = 1.0
    """Probability mass to choose within."""
    stop_tokens: tuple[int, ...] | None = None
    """Ids that end a sequence, beside the model's end-of-sequence ids, and are its last token. Empty, and without stop
    strings: nothing ends a sequence but `max_tokens`, not even the end-of-sequence ids."""
    stop_strings: tuple[str, ...] = ()
    """Texts that end a sequence, and are part of it."""


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Sample:
    """Sample sequences after a prompt."""

    sampling_session_id: str
    """Of the sampling session."""
    seq_id: int
    """Number within it, from 0 or from a large number."""
    prompt: tuple[Chunk, ...]
    """Text and images in order."""
    num_samples: int
    """Sequences wanted."""
    params: SamplingParams
    """Settings."""
    prompt_logprobs: bool = False
    """Also return the log-probability of each token of the prompt."""
    topk_prompt_logprobs: int = 0
    """Also return as many of the most likely tokens at each place of the prompt."""
    prompt_logprobs_last_n: int | None = None
    """Return both for the last n tokens of the prompt alone; None: for all."""

    @property
    def wants_scores(self) -> bool:
        """Return whether anything is wanted of the tokens of the prompt."""
        return self.prompt_logprobs or self.topk_prompt_logprobs > 0


Creation = CreateModel | CreateFromCheckpoint
Request = ForwardBackward | OptimStep | SaveWeights | SaveForSampler | SaveExternal | LoadWeights | Creation | Sample

# ---------------------------------------------------------------------- results


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class ForwardBackwardResult:
    """Of a `ForwardBackward`."""

    logprobs: tuple[np.ndarray, ...]
    """float32 [N] of each datum: log-probability of every target, whatever its weight; [N, K] where tokens have several
    targets, 0 where the weight is."""
    metrics: Mapping[str, float]
    """By `name:reduction`, `loss:sum` among them."""


@final
@dataclass(frozen=True, kw_only=True)
class OptimStepResult:
    """Of an `OptimStep`."""

    metrics: Mapping[str, float]
    """By `name:reduction`."""


@final
@dataclass(frozen=True, kw_only=True)
class CreatedModel:
    """Of a `CreateModel`."""

    model_id: str
    """Of the model."""


@final
@dataclass(frozen=True, kw_only=True)
class SavedWeights:
    """Of a `SaveWeights` or a `SaveExternal`."""

    path: str
    """`tinker://...`"""
    is_external: bool = False
    """True of a `SaveExternal`."""


@final
@dataclass(frozen=True, kw_only=True)
class SavedForSampler:
    """Of a `SaveForSampler`; one of the two is None."""

    path: str | None = None
    """`tinker://...`"""
    sampling_session_id: str | None = None
    """Of the new sampling session."""


@final
@dataclass(frozen=True, kw_only=True)
class LoadedWeights:
    """Of a `LoadWeights` or a `CreateFromCheckpoint`."""

    path: str
    """`tinker://...` of the checkpoint."""
    model_id: str | None = None
    """Of the model, if it was created."""


StopReason = Literal["stop", "length"]


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class SampledSequence:
    """One sampled sequence."""

    tokens: np.ndarray
    """int32 [n]: the token that ended it included."""
    logprobs: np.ndarray
    """float32 [n]: of the model's whole distribution, whatever temperature, top-k and top-p leave of it."""
    stop_reason: StopReason
    """"stop": a stop token or string; "length": `max_tokens` or the context."""


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class PromptScores:
    """What the model says of the tokens of a prompt; where it says nothing, log-probabilities are NaN."""

    logprobs: np.ndarray
    """float32 [N]: log-probability of each token after those before it, NaN at the first."""
    top_ids: np.ndarray
    """int32 [N, K]: the most likely tokens in each one's place, the likeliest first."""
    top_logprobs: np.ndarray
    """float32 [N, K]: their log-probabilities."""

    def of_last(self, n: int | None) -> PromptScores:
        """Return the same of the last n tokens alone; None: of all."""
        known = np.arange(len(self.logprobs)) >= (0 if n is None else len(self.logprobs) - n)
        logprobs, top = np.where(known, self.logprobs, np.nan), np.where(known[:, None], self.top_logprobs, np.nan)
        return PromptScores(logprobs=logprobs, top_ids=self.top_ids, top_logprobs=top)


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class SampleResult:
    """Of a `Sample`."""

    sequences: tuple[SampledSequence, ...]
    """`num_samples` of them, in the order of their seeds."""
    scores: PromptScores | None = None
    """Of the prompt; None: not wanted."""
    prompt_cache_hit_tokens: int = 0
    """N if another request had the prompt computed, 0 else; vLLM has numbers between."""


Result = (
    ForwardBackwardResult
    | OptimStepResult
    | CreatedModel
    | SavedWeights
    | SavedForSampler
    | LoadedWeights
    | SampleResult
)


@final
@dataclass(frozen=True, kw_only=True)
class Failure:
    """A request that failed."""

    message: str
    """The fault and the remedy."""
    category: Literal["user", "server"]
    """Whose mistake it is."""


Outcome = Result | Failure


@final
@dataclass(frozen=True, kw_only=True)
class Reply:
    """An outcome as it goes over the wire."""

    content_type: str
    """JSON, or protobuf for results of training and sampling."""
    body: bytes
    """Encoded."""


@final
class Rejected(RequestError):  # noqa: N818 (an answer, not an accident)
    """A POST or GET is answered with a status instead of a result.

    Args:
        message: what was seen and the remedy.
        status: of the answer.
        retry_after: seconds after which to try again.
        beginning: of the body, as far as it was received.
    """

    def __init__(self, message: str, *, status: int, retry_after: float | None = None, beginning: bytes = b"") -> None:
        super().__init__(message)
        self.status, self.retry_after, self.beginning = status, retry_after, beginning
