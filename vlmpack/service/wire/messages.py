"""Requests of clients and their results, as every module of the service sees them; numpy, never torch.

Annotations say how pydantic reads a field from JSON and which numbers are valid (fields.py). So what came from a client
is valid, except for checks that need the model.

    operations of a model, in the order of their seq_id        a model's first operation, which has no seq_id
    ├─ ForwardBackward   gradients, or log-probabilities only   ├─ CreateModel
    ├─ OptimStep         one step of AdamW                      └─ CreateFromCheckpoint
    ├─ SaveWeights       a training checkpoint
    ├─ SaveForSampler    an immutable snapshot to sample from   Sample: an operation of a sampling session
    ├─ SaveExternal      files to download
    └─ LoadWeights       back from a checkpoint

A datum has N tokens: the tokens of its text chunks, plus the tokens that the model's processor makes of each image.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, final

import numpy as np
from pydantic import AfterValidator, AliasPath, Discriminator, FailFast, Field, PlainValidator, StrictBool, Tag

from vlmpack.errors import RequestError, VlmpackError
from vlmpack.service.wire.fields import INT32, INT64, STRICT, Count, Notes, between, settings

OperationNumber = Annotated[int, between(1)]
"""Position among the operations of a model."""
LargeCount = Annotated[int, between(0, INT64)]
Seed = Annotated[int, between(-INT64 - 1, INT64)]
Seconds = Annotated[int, between(1, 10 * 366 * 86_400)]
"""Time until a checkpoint expires: at most ten years, as the client's documentation says."""
TopCount = Annotated[int, between(0, 256)]
"""Number of most likely tokens to return per position."""
Positive = Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)]
"""A finite number, 0 or more."""
MOST_DRAWS = 64
"""Maximum number of tokens drawn per position of a prompt."""

# ---------------------------------------------------------------------- what a model reads


def _read_ids(value: Any) -> np.ndarray:
    if not isinstance(value, list) or not all(type(token) is int and abs(token) <= INT32 for token in value):
        raise ValueError("a list of token ids is needed, which are whole numbers")
    return np.array(value, dtype=np.int32)


def read_base64(value: Any) -> bytes:
    """Decode base64."""
    try:
        return base64.b64decode(value, validate=True)
    except (TypeError, ValueError) as error:
        raise ValueError(f"not base64 ({error})") from error


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class TextChunk:
    """Consecutive token ids."""

    tokens: Annotated[np.ndarray, PlainValidator(_read_ids)]
    """int32 [n]: ids as the client sent them, not yet checked against the vocabulary."""


@final
@dataclass(frozen=True, kw_only=True)
class ImageChunk:
    """The bytes of an image file."""

    data: Annotated[bytes, PlainValidator(read_base64)]
    """Bytes of a PNG or JPEG file."""
    format: str
    """"png" or "jpeg", as the client sent it."""
    expected_tokens: Count | None = None
    """Number of tokens that the client counted; None: it did not count."""


Chunk = TextChunk | ImageChunk


def _type_of(value: Any) -> Any:
    return value.get("type") if isinstance(value, dict) else None


ChunkInJson = Annotated[
    Annotated[TextChunk, Tag("encoded_text")] | Annotated[ImageChunk, Tag("image")],
    Discriminator(
        _type_of,
        custom_error_type="chunk",
        custom_error_message="this service takes text and images as bytes, and fetches nothing",
    ),
]
"""How a chunk is read from JSON, by its type."""


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class SparseMatrix:
    """A matrix [N, K] as a list of entries; entries that are not listed are 0."""

    keys: np.ndarray
    """int64 [M]: row * K + column, increasing."""
    values: np.ndarray
    """[M]: value of each listed entry."""
    shape: tuple[int, int]
    """N, K."""
    is_dense: bool = False
    """True if the client sent a dense matrix, so that all entries are listed."""

    @classmethod
    def of_rows(
        cls, name: str, ends: np.ndarray, columns: np.ndarray, values: np.ndarray, shape: Sequence[int]
    ) -> SparseMatrix:
        """Read a matrix in compressed rows (CSR) without making it dense: a few bytes can stand for gigabytes.

        Raises:
            RequestError: the parts of the matrix do not fit together.
        """
        counts = np.diff(ends)
        is_whole = len(shape) == 2 and min(shape) >= 0 and shape[1] <= INT32 and len(ends) == shape[0] + 1
        if not is_whole or ends[0] or (counts < 0).any() or not ends[-1] == len(columns) == len(values):
            message = f"{name}: a sparse matrix of shape {list(shape)} with other counts of entries than it says"
            raise RequestError(message)
        keys = np.repeat(np.arange(len(counts)), counts) * shape[1] + columns
        if ((columns < 0) | (columns >= shape[1])).any() or (np.diff(keys) <= 0).any():
            raise RequestError(f"{name}: columns of a sparse matrix that are outside, twice there, or not in order")
        return cls(keys=keys, values=values, shape=(shape[0], shape[1]))


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Datum:
    """One sample of a training request."""

    chunks: tuple[Chunk, ...]
    """Text and images, in order."""
    inputs: Mapping[str, np.ndarray | SparseMatrix] = field(default_factory=dict)
    """Inputs of the loss by name, e.g. `target_tokens` (int64) and `weights` (float32), with the shapes that were
    sent."""


# ---------------------------------------------------------------------- operations of a model


@dataclass(frozen=True, kw_only=True, eq=False)
class Operation:
    """An operation of a model."""

    model_id: str
    """Id of the model."""
    seq_id: OperationNumber
    """Position among the operations of the model, from 1."""

    @property
    def owner(self) -> tuple[str, int]:
        """Id of the model, and the operation's number within it."""
        return self.model_id, self.seq_id


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class ForwardBackward(Operation):
    """Add the gradient of a loss, summed over the tokens of some datums. Either all datums count, or none."""

    data: tuple[Datum, ...]
    """The datums, at least one."""
    loss_fn: str
    """Name of the loss, not yet checked."""
    loss_config: Mapping[str, float | str] = field(default_factory=dict)
    """Settings of the loss."""
    forward_only: bool = False
    """Compute the loss and log-probabilities only; add no gradient."""


@final
@dataclass(frozen=True, kw_only=True)
class AdamParams:
    """Settings of one AdamW step, all finite. The defaults are the client's own."""

    __pydantic_config__ = STRICT

    learning_rate: Positive = 1e-4
    """Learning rate."""
    beta1: Annotated[float, Field(strict=True, ge=0, lt=1)] = 0.9
    """Decay of the first moment."""
    beta2: Annotated[float, Field(strict=True, ge=0, lt=1)] = 0.95
    """Decay of the second moment."""
    eps: Annotated[float, Field(strict=True, ge=2.0**-149, allow_inf_nan=False)] = 1e-12
    """Term added to the square root of the second moment. It must not be 0 in float32, or a step without a gradient
    would compute 0 / 0."""
    weight_decay: Positive = 0.0
    """Decoupled weight decay."""
    grad_clip_norm: Annotated[float, Field(strict=True, allow_inf_nan=False)] = 0.0
    """Maximum norm of the whole gradient; 0 or less: no clipping."""


@final
@dataclass(frozen=True, kw_only=True)
class OptimStep(Operation):
    """Apply the accumulated gradient and clear it."""

    adam: Annotated[AdamParams, Field(alias="adam_params"), settings(AdamParams)]
    """Settings of this step."""


@dataclass(frozen=True, kw_only=True)
class Save(Operation):
    """Save the weights of a model."""

    name: Annotated[str, Field(alias="path")]
    """Name of what is saved."""
    user_metadata: Notes = field(default_factory=dict)
    """The client's own metadata."""
    ttl_seconds: Seconds | None = None
    """Seconds after which it is deleted; None: never."""


@final
@dataclass(frozen=True, kw_only=True)
class SaveWeights(Save):
    """Save a training checkpoint: weights, moments, and the settings needed to recreate the model."""

    overwrite: StrictBool = False
    """Replace an existing checkpoint of this name."""


@final
@dataclass(frozen=True, kw_only=True)
class SaveForSampler(Save):
    """Save an immutable snapshot of the weights to sample from."""

    name: Annotated[str | None, Field(alias="path")] = None  # pyright: ignore
    """Name of a permanent snapshot; None: the snapshot belongs to a new sampling session."""
    sampling_session_seq_id: LargeCount | None = None
    """Number of the new sampling session within its session; ignored if `name` is given."""
    kind: Literal["snapshot", "inflight"] = "snapshot"
    """Kind of snapshot; the service treats both the same."""

    def __post_init__(self) -> None:
        if self.name is None and self.sampling_session_seq_id is None:
            raise RequestError("neither path nor sampling_session_seq_id: send the name of the snapshot as path")


@final
@dataclass(frozen=True, kw_only=True)
class SaveExternal(Save):
    """Save the weights for other programs: an adapter in PEFT's format, a full model in transformers' format."""


@final
@dataclass(frozen=True, kw_only=True)
class LoadWeights(Operation):
    """Go back to a training checkpoint; accumulated gradients are dropped."""

    path: str
    """`tinker://...` path of the checkpoint."""
    optimizer: StrictBool
    """Load moments and step count too; False: reset the optimizer."""


# ---------------------------------------------------------------------- new sessions and models


@dataclass(frozen=True, kw_only=True)
class NewSession:
    """The client's description of its session."""

    tags: Annotated[tuple[str, ...], FailFast()] = ()
    """The client's tags."""
    user_metadata: Notes = field(default_factory=dict)
    """The client's own metadata."""
    sdk_version: str = ""
    """Version of the client."""
    display_name: str | None = None
    """The client's name for the session; None: it gave none."""


@final
@dataclass(frozen=True, kw_only=True)
class NewSampler:
    """A request for a sampling session from a checkpoint or the base model."""

    session_id: str
    """Id of the session."""
    sampling_session_seq_id: LargeCount
    """Number of the sampling session within its session."""
    model_path: str | None = None
    """`tinker://...` path of the checkpoint; None: the base model."""
    base_model: str | None = None
    """Name of the base model; optional with `model_path`."""


@final
@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Settings of a LoRA adapter."""

    __pydantic_config__ = STRICT

    rank: Count
    """Rank of the matrices."""
    seed: Seed | None = None
    """Seed of the initial weights; None: random."""
    train_unembed: StrictBool = True
    """Adapt the language-model head."""
    train_mlp: StrictBool = True
    """Adapt MLPs."""
    train_attn: StrictBool = True
    """Adapt attention, gated delta layers and short convolutions."""


def _whole_model(lora: LoraConfig) -> LoraConfig | None:
    """Return the settings of an adapter, or None for rank 0, with which SkyRL's clients ask for all weights."""
    chosen = (lora.train_unembed, lora.train_mlp, lora.train_attn)
    if lora.rank == 0 and not all(chosen):
        raise ValueError("rank 0 trains all weights; leave train_unembed, train_mlp, train_attn out, or set a rank")
    return lora if lora.rank else None


@dataclass(frozen=True, kw_only=True)
class Creation:
    """A new model of a session."""

    session_id: str
    """Id of the session."""
    model_seq_id: Count
    """Number of the model within its session, from 0."""
    user_metadata: Notes = field(default_factory=dict)
    """The client's own metadata."""

    @property
    def owner(self) -> tuple[str, int]:
        """Id of the new model, and 0, the number of a model's first operation."""
        return f"{self.session_id}:train:{self.model_seq_id}", 0


@final
@dataclass(frozen=True, kw_only=True)
class CreateModel(Creation):
    """Create a model of a session."""

    base_model: str
    """Name of the base model."""
    lora: Annotated[
        LoraConfig | None, Field(alias="lora_config"), settings(LoraConfig), AfterValidator(_whole_model)
    ] = None
    """Settings of the adapter; None: all weights are trained."""


@final
@dataclass(frozen=True, kw_only=True)
class CreateFromCheckpoint(Creation):
    """Create a model of a session from a training checkpoint, with its rank and targets."""

    path: str
    """`tinker://...` path of the checkpoint."""
    optimizer: StrictBool
    """Load moments and step count too."""
    base_model: str | None = None
    """Name of the base model, which must be the checkpoint's; None: use the checkpoint's."""


# ---------------------------------------------------------------------- sampling


def _read_stop(value: Any) -> tuple[int, ...] | tuple[str, ...]:
    """Read what ends a sequence: one string, a list of strings, or a list of token ids."""
    stop = [value] if isinstance(value, str) else value
    if not isinstance(stop, list):
        raise ValueError("a text or a list is needed")
    are_ids = all(type(token) is int and 0 <= token <= INT32 for token in stop)
    if not are_ids and not all(isinstance(text, str) for text in stop):
        raise ValueError("token ids, or texts, but not both, are needed")
    if "" in stop:
        raise ValueError("an empty text stops everything")
    return tuple(stop)


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Settings of sampling."""

    __pydantic_config__ = STRICT

    max_tokens: Annotated[int, between(1)] | None = None
    """Maximum number of tokens of a sequence; None: up to the model's context."""
    seed: Seed | None = None
    """Seed of the first sequence; sequence i gets seed + i. None: random."""
    temperature: Positive = 1.0
    """Sampling temperature; 0: greedy."""
    top_k: Annotated[int, between(-1)] = -1
    """Number of most likely tokens to choose from; 0 or less: all."""
    top_p: Annotated[float, Field(strict=True, gt=0, le=1)] = 1.0
    """Probability mass to choose within (nucleus sampling)."""
    stop: Annotated[tuple[int, ...] | tuple[str, ...], PlainValidator(_read_stop)] | None = None
    """Ids or strings that end a sequence, in addition to the model's end-of-sequence ids. They are part of the
    sequence. Empty: only `max_tokens` ends a sequence, and not even the end-of-sequence ids do."""

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The strings in `stop`."""
        return tuple(text for text in self.stop or () if isinstance(text, str))


def _read_targets(value: Any) -> SparseMatrix:
    """Read target ids [N - 1, K] in the client's tensor format, dense or in compressed rows (CSR)."""

    def numbers(name: str, low: int = 0) -> np.ndarray:
        listed = value.get(name) if isinstance(value, dict) else None
        if not isinstance(listed, list) or not all(type(x) is int and low <= x <= INT32 for x in listed):
            raise ValueError(f"{name}: a list of whole numbers from {low} to {INT32} is needed")
        return np.array(listed, np.int64)

    ids, shape = numbers("data", -1), numbers("shape").tolist()
    if value.get("sparse_crow_indices") is not None:
        return SparseMatrix.of_rows("ids", numbers("sparse_crow_indices"), numbers("sparse_col_indices"), ids, shape)
    if len(shape) != 2 or shape[0] * shape[1] != len(ids):
        raise ValueError(f"{len(ids)} ids, but shape {shape}; send [tokens of the prompt - 1, K]")
    return SparseMatrix(keys=np.arange(len(ids)), values=ids, shape=(shape[0], shape[1]), is_dense=True)


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Sample:
    """Sample sequences that continue a prompt."""

    sampling_session_id: str
    """Id of the sampling session."""
    seq_id: LargeCount
    """Number within the sampling session. The first one may be 0 or a large number."""
    prompt: Annotated[tuple[ChunkInJson, ...], FailFast(), Field(validation_alias=AliasPath("prompt", "chunks"))]
    """Text and images, in order."""
    num_samples: Annotated[int, between(1)] = 1
    """Number of sequences."""
    params: Annotated[SamplingParams, Field(alias="sampling_params"), settings(SamplingParams)]
    """Settings of sampling."""
    prompt_logprobs: StrictBool = False
    """Also return the log-probability of each prompt token."""
    topk_prompt_logprobs: TopCount = 0
    """Also return this many of the most likely tokens at each position of the prompt."""
    prompt_logprobs_last_n: Annotated[int, between(1)] | None = None
    """Return both for the last n tokens of the prompt only; None: for all."""
    topk_sample_logprobs: TopCount = 0
    """Also return this many of the most likely tokens at each sampled position."""
    target_prompt_logprobs: Annotated[SparseMatrix, PlainValidator(_read_targets)] | None = None
    """int64 [N - 1, K]: ids whose log-probabilities are returned at each position of the prompt except the first; -1:
    no id."""
    prompt_alt_tokens_k: Annotated[int, between(0, MOST_DRAWS)] = 0
    """Also return this many tokens drawn at each position of the prompt except the first."""

    @property
    def owner(self) -> tuple[str, int]:
        """Id of the sampling session, and the number within it."""
        return self.sampling_session_id, self.seq_id

    @property
    def wants_scores(self) -> bool:
        """Whether the request asks for any scores of the prompt tokens."""
        counts = self.prompt_logprobs or self.topk_prompt_logprobs or self.prompt_alt_tokens_k
        return bool(counts) or self.target_prompt_logprobs is not None


Request = ForwardBackward | OptimStep | SaveWeights | SaveForSampler | SaveExternal | LoadWeights | Creation | Sample

# ---------------------------------------------------------------------- results


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class ForwardBackwardResult:
    """Result of a `ForwardBackward`."""

    logprobs: tuple[np.ndarray, ...]
    """float32 [N] per datum: log-probability of every target, whatever its weight. [N, K] with soft targets, and then 0
    where the weight is 0."""
    metrics: Mapping[str, float]
    """Metrics by `name:reduction`, including `loss:sum`."""


StopReason = Literal["stop", "length"]


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class SampledSequence:
    """One sampled sequence."""

    tokens: np.ndarray
    """int32 [n], including the token that ended the sequence."""
    logprobs: np.ndarray
    """float32 [n]: log-probabilities under the model's full distribution, before temperature, top-k and top-p."""
    stop_reason: StopReason
    """"stop": a stop token or string; "length": `max_tokens` or the context."""
    top: TopTokens | None = None
    """The most likely tokens at each position; None: not requested."""


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class TopTokens:
    """Tokens for each of n positions, with their log-probabilities under the model's full distribution."""

    ids: np.ndarray
    """int32 [n, K]."""
    logprobs: np.ndarray
    """float32 [n, K]; NaN: unknown."""


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class PromptScores:
    """Scores of the tokens of a prompt. Log-probabilities that are not known are NaN."""

    logprobs: np.ndarray
    """float32 [N]: log-probability of each token given the tokens before it; NaN at the first."""
    top: TopTokens
    """[N, K]: the most likely tokens at each position, the likeliest first; K may be 0."""
    targets: SparseMatrix | None = None
    """float32: log-probabilities of the requested ids, 0 where no id was requested; None: not requested."""
    drawn: TopTokens | None = None
    """[N - 1, k]: tokens drawn at each position except the first; None: not requested."""

    def of_last(self, n: int | None) -> PromptScores:
        """Keep `logprobs` and `top` of the last n tokens and set the others to NaN; None: keep all."""
        known = np.arange(len(self.logprobs)) >= (0 if n is None else len(self.logprobs) - n)
        top = replace(self.top, logprobs=np.where(known[:, None], self.top.logprobs, np.nan))
        return replace(self, logprobs=np.where(known, self.logprobs, np.nan), top=top)


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class SampleResult:
    """Result of a `Sample`."""

    sequences: tuple[SampledSequence, ...]
    """`num_samples` sequences, in the order of their seeds."""
    scores: PromptScores | None = None
    """Scores of the prompt; None: not requested."""
    prompt_cache_hit_tokens: int = 0
    """N if the prompt had already been computed for another request, otherwise 0. With vLLM, any number of tokens up to
    N."""


@final
@dataclass(frozen=True, kw_only=True)
class Failure:
    """A request that failed."""

    message: str
    """What went wrong, and what to do."""
    category: Literal["user", "server"]
    """Whose fault it is."""

    @classmethod
    def of(cls, error: BaseException, *, place: str = "the server failed: ") -> Failure:
        """Make a failure from an error; `place` says where an error came from that is not the package's own."""
        message = str(error) if isinstance(error, VlmpackError) else f"{place}{type(error).__name__}: {error}"
        return cls(message=message, category="user" if isinstance(error, RequestError) else "server")


Outcome = ForwardBackwardResult | SampleResult | Mapping[str, Any] | Failure
"""What becomes of a request. Operations other than training return the JSON object that the client reads."""


@final
@dataclass(frozen=True, kw_only=True)
class Reply:
    """An outcome in its wire format."""

    content_type: str
    """JSON, or protobuf for results of training and sampling."""
    body: bytes
    """The encoded outcome."""


class Rejected(RequestError):  # noqa: N818 (an answer, not an accident)
    """A request that is answered with an HTTP error status instead of a result.

    Args:
        message: what was wrong, and what to do.
        status: HTTP status of the reply; 429 and 503 ask the client to try again.
        beginning: the part of the body that was received.
    """

    def __init__(self, message: str, *, status: int, beginning: bytes = b"") -> None:
        super().__init__(message)
        self.status, self.beginning = status, beginning
