"""Requests of clients and their results, as every part of the service has them; numpy, never torch.

Annotations say how a request is read from JSON and which numbers it may have (`fields`); so one that is here is valid,
but for what needs the model.

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

import base64
import binascii
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Annotated, Any, Literal, final

import numpy as np

from vlmpack.errors import RequestError
from vlmpack.service.fields import INT32, INT64, Between, as_list, check, get, read, read_text, shown

TTL = 10 * 366 * 86_400
"""Most seconds until a checkpoint expires: ten years, as the client's documents say."""
MOST_TOP = 256
"""Most tokens whose log-probabilities are returned for a place."""
MOST_DRAWS = 64
"""Most tokens that are drawn in a place of a prompt."""

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
    is_dense: bool = False
    """True if all entries are listed, as the client sent all of them."""

    @classmethod
    def of_rows(
        cls, name: str, ends: np.ndarray, columns: np.ndarray, values: np.ndarray, shape: Sequence[int]
    ) -> SparseMatrix:
        """Read a matrix in compressed rows (CSR), without making it dense: a few bytes can stand for gigabytes.

        Raises:
            RequestError: its parts do not fit together.
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
    """Text and images in order."""
    inputs: Mapping[str, np.ndarray | SparseMatrix] = field(default_factory=dict)
    """Inputs of the loss by name, such as `target_tokens` (int64) and `weights` (float32), with the shapes sent."""


# ---------------------------------------------------------------------- operations of a model


@dataclass(frozen=True, kw_only=True, eq=False)
class Operation:
    """An operation of a model."""

    model_id: str
    """Of the model."""
    seq_id: Annotated[int, Between(1)]
    """Place among the operations of its model, from 1."""

    @property
    def owner(self) -> tuple[str, int]:
        """The id of the model, and the number within it."""
        return self.model_id, self.seq_id


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class ForwardBackward(Operation):
    """Add the gradient of a loss over some datums, summed over their tokens; all of them or none."""

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
    """Settings of one step of AdamW, all of them finite. The defaults are the client's own."""

    learning_rate: Annotated[float, Between(0, inf)] = 1e-4
    """Learning rate."""
    beta1: Annotated[float, Between(0, 1, excluded=1)] = 0.9
    """Decay of the first moment."""
    beta2: Annotated[float, Between(0, 1, excluded=1)] = 0.95
    """Decay of the second moment."""
    eps: Annotated[float, Between(2.0**-149, inf)] = 1e-12
    """Added to the square root of the second moment: not 0 in float32, or a step without a gradient would be 0 / 0."""
    weight_decay: Annotated[float, Between(0, inf)] = 0.0
    """Decoupled decay."""
    grad_clip_norm: float = 0.0
    """Largest norm of the whole gradient; not above 0: any."""


@final
@dataclass(frozen=True, kw_only=True)
class OptimStep(Operation):
    """Apply the accumulated gradient and clear it."""

    adam: AdamParams
    """Settings of this step."""


@dataclass(frozen=True, kw_only=True)
class Save(Operation):
    """Save the weights of a model."""

    name: str
    """Of what is saved."""
    user_metadata: Mapping[str, str] = field(default_factory=dict)
    """The client's own notes."""
    ttl_seconds: Annotated[int, Between(1, TTL)] | None = None
    """Seconds after which it is deleted; None: it stays."""


@final
@dataclass(frozen=True, kw_only=True)
class SaveWeights(Save):
    """Save a training checkpoint: weights, moments, and what a model is created anew with."""

    overwrite: bool = False
    """Replace a checkpoint of this name."""


@final
@dataclass(frozen=True, kw_only=True)
class SaveForSampler(Save):
    """Save an immutable snapshot of the weights to sample from."""

    name: str | None = None  # pyright: ignore
    """Of a snapshot that stays; None: it belongs to a new sampling session."""
    sampling_session_seq_id: Annotated[int, Between(0, INT64)] | None = None
    """Number of that sampling session within its session; not read with a name."""
    kind: Literal["snapshot", "inflight"] = "snapshot"
    """Both are snapshots here."""

    def __post_init__(self) -> None:
        if self.name is None and self.sampling_session_seq_id is None:
            raise RequestError("neither path nor sampling_session_seq_id: send the name of the snapshot as path")


@final
@dataclass(frozen=True, kw_only=True)
class SaveExternal(Save):
    """Save the weights for others than this service: an adapter as PEFT loads it, a model as transformers does."""


@final
@dataclass(frozen=True, kw_only=True)
class LoadWeights(Operation):
    """Go back to a training checkpoint; accumulated gradients are dropped."""

    path: str
    """`tinker://...` of the checkpoint."""
    optimizer: bool
    """Load moments and step count too; False: the optimiser starts anew."""


# ---------------------------------------------------------------------- new sessions and models


@final
@dataclass(frozen=True, kw_only=True)
class NewSession:
    """What a client says of its session."""

    tags: tuple[str, ...] = ()
    """The client's."""
    user_metadata: Mapping[str, str] = field(default_factory=dict)
    """The client's own notes."""
    sdk_version: str = ""
    """Of the client."""
    display_name: str | None = None
    """The client's name for it; None: it gave none."""


@final
@dataclass(frozen=True, kw_only=True)
class NewSampler:
    """A sampling session from a checkpoint, or from the base model."""

    session_id: str
    """Of the session."""
    sampling_session_seq_id: Annotated[int, Between(0, INT64)]
    """Number of the sampling session within its session."""
    model_path: str | None = None
    """`tinker://...` of the checkpoint; None: the base model."""
    base_model: str | None = None
    """Name of the base model, which may be left out with a path."""


@final
@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Settings of a LoRA adapter."""

    rank: int
    """Rank of its matrices."""
    seed: Annotated[int, Between(-INT64 - 1, INT64)] | None = None
    """Of its weights; None: random."""
    train_unembed: bool = True
    """Adapt the head."""
    train_mlp: bool = True
    """Adapt MLPs."""
    train_attn: bool = True
    """Adapt attention and gated delta layers."""


def read_lora(value: Any, place: str) -> LoraConfig | None:
    """Read the settings of an adapter; None: rank 0, by which the client, as of SkyRL, asks for all weights."""
    lora = read(LoraConfig, value, place)
    chosen = {name: getattr(lora, name) for name in ("train_unembed", "train_mlp", "train_attn")}
    if not any(chosen.values()):
        raise RequestError(f"{place}: no part of the model is trained; set one of {', '.join(chosen)}")
    if lora.rank == 0 and not all(chosen.values()):
        raise RequestError(f"{place}: rank 0 trains all weights; leave {', '.join(chosen)} out, or set a rank")
    return lora if lora.rank else None


@dataclass(frozen=True, kw_only=True)
class Creation:
    """A new model of a session."""

    session_id: str
    """Of the session."""
    model_seq_id: int
    """Number of the model within its session, from 0."""
    user_metadata: Mapping[str, str] = field(default_factory=dict)
    """The client's own notes."""

    @property
    def owner(self) -> tuple[str, int]:
        """The id of the model, and the number within it."""
        return f"{self.session_id}:train:{self.model_seq_id}", 0


@final
@dataclass(frozen=True, kw_only=True)
class CreateModel(Creation):
    """Create a model of a session."""

    base_model: str
    """Name of the base model."""
    lora: Annotated[LoraConfig | None, read_lora] = None
    """Its adapter; None: all weights are trained."""


@final
@dataclass(frozen=True, kw_only=True)
class CreateFromCheckpoint(Creation):
    """Create a model of a session from a training checkpoint, with its rank and targets."""

    path: str
    """`tinker://...` of the checkpoint."""
    optimizer: bool
    """Load moments and step count too."""
    base_model: str | None = None
    """Name of the base model, which has to be the checkpoint's; None: the checkpoint's."""


# ---------------------------------------------------------------------- sampling


def read_stop(value: Any, place: str) -> tuple[int, ...] | tuple[str, ...]:
    """Read what ends a sequence: a text, texts, or ids."""
    stop = [value] if isinstance(value, str) else as_list(value, place)
    if all(type(token) is int and 0 <= token <= INT32 for token in stop):
        return tuple(stop)
    if not all(isinstance(text, str) for text in stop):
        raise RequestError(f"{place}: token ids, or texts, but not both, are needed")
    if not all(read_text(text, place) for text in stop):
        raise RequestError(f"{place}: an empty text stops everything")
    return tuple(stop)


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Settings of sampling."""

    max_tokens: Annotated[int, Between(1)] | None = None
    """Most tokens of a sequence; None: up to the model's context."""
    seed: Annotated[int, Between(-INT64 - 1, INT64)] | None = None
    """Of the first sequence; sequence i has seed + i. None: random."""
    temperature: Annotated[float, Between(0, inf)] = 1.0
    """0: greedy."""
    top_k: Annotated[int, Between(-1)] = -1
    """Most likely tokens to choose among; not above 0: all."""
    top_p: Annotated[float, Between(0, 1, excluded=0)] = 1.0
    """Probability mass to choose within."""
    stop: Annotated[tuple[int, ...] | tuple[str, ...] | None, read_stop] = None
    """Ids or texts that end a sequence, beside the model's end-of-sequence ids, and are part of it. Empty: nothing ends
    a sequence but `max_tokens`, not even the end-of-sequence ids."""

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The texts among `stop`."""
        return tuple(text for text in self.stop or () if isinstance(text, str))


def read_prompt(value: Any, place: str) -> tuple[Chunk, ...]:
    """Read the chunks of a prompt."""
    chunks = get(check(dict, value, place, "an object"), "chunks", Annotated[Any, as_list], place=f"{place}.")
    return tuple(_chunk(chunk, f"prompt chunk {index}") for index, chunk in enumerate(chunks))


def _chunk(value: Any, name: str) -> Chunk:
    values, place = check(dict, value, name, "an object"), f"{name}."
    kind = get(values, "type", str, place=place)
    if kind == "encoded_text":
        tokens = get(values, "tokens", Annotated[Any, as_list], place=place)
        if not all(type(token) is int and abs(token) <= INT32 for token in tokens):
            raise RequestError(f"{place}tokens: something else than token ids, which are whole numbers")
        return TextChunk(tokens=np.array(tokens, dtype=np.int32))
    if kind == "image":
        data = read_base64(get(values, "data", str, place=place), f"{place}data")
        expected = get(values, "expected_tokens", int, None, place=place)
        return ImageChunk(data=data, format=get(values, "format", str, place=place), expected_tokens=expected)
    if kind == "image_asset_pointer":
        raise RequestError(f"{place}location: this service fetches nothing; send the image's bytes (ImageChunk)")
    raise RequestError(f"{place}type {shown(kind)}: this service takes text and images")


def read_targets(value: Any, place: str) -> SparseMatrix:
    """Read ids [N - 1, K] whose log-probabilities are wanted, as the client sends a tensor, dense or in rows."""
    values = check(dict, value, place, "an object")

    def numbers(name: str, low: int = 0) -> np.ndarray:
        listed = get(values, name, Annotated[Any, as_list], place=f"{place}.")
        if not all(type(number) is int and low <= number <= INT32 for number in listed):
            raise RequestError(f"{place}.{name}: something else than whole numbers from {low} to {INT32}")
        return np.array(listed, np.int64)

    ids, shape = numbers("data", -1), numbers("shape").tolist()
    if values.get("sparse_crow_indices") is not None:
        return SparseMatrix.of_rows(place, numbers("sparse_crow_indices"), numbers("sparse_col_indices"), ids, shape)
    if len(shape) != 2 or shape[0] * shape[1] != len(ids):
        raise RequestError(f"{place}: {len(ids)} ids, but shape {shape}; send [tokens of the prompt - 1, K]")
    return SparseMatrix(keys=np.arange(len(ids)), values=ids, shape=(shape[0], shape[1]), is_dense=True)


def read_base64(text: str, place: str) -> bytes:
    """Decode bytes in base64."""
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise RequestError(f"{place}: not base64 ({error})") from error


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Sample:
    """Sample sequences after a prompt."""

    sampling_session_id: str
    """Of the sampling session."""
    seq_id: Annotated[int, Between(0, INT64)]
    """Number within it, from 0 or from a large number."""
    prompt: Annotated[tuple[Chunk, ...], read_prompt]
    """Text and images in order."""
    num_samples: Annotated[int, Between(1)] = 1
    """Sequences wanted."""
    params: SamplingParams
    """Settings."""
    prompt_logprobs: bool = False
    """Also return the log-probability of each token of the prompt."""
    topk_prompt_logprobs: Annotated[int, Between(0, MOST_TOP)] = 0
    """Also return as many of the most likely tokens at each place of the prompt."""
    prompt_logprobs_last_n: Annotated[int, Between(1)] | None = None
    """Return both for the last n tokens of the prompt alone; None: for all."""
    topk_sample_logprobs: Annotated[int, Between(0, MOST_TOP)] = 0
    """Also return as many of the most likely tokens in the place of each sampled one."""
    target_prompt_logprobs: Annotated[SparseMatrix | None, read_targets] = None
    """int64 [N - 1, K]: ids whose log-probabilities are returned in the place of each token but the first; -1: none."""
    prompt_alt_tokens_k: Annotated[int, Between(0, MOST_DRAWS)] = 0
    """Also return as many tokens drawn in the place of each token of the prompt but the first."""

    @property
    def owner(self) -> tuple[str, int]:
        """The id of the sampling session, and the number within it."""
        return self.sampling_session_id, self.seq_id

    @property
    def wants_scores(self) -> bool:
        """Return whether anything is wanted of the tokens of the prompt."""
        counts = self.prompt_logprobs or self.topk_prompt_logprobs or self.prompt_alt_tokens_k
        return bool(counts) or self.target_prompt_logprobs is not None


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
    type: str = "create_model"
    """As the client reads it."""


@final
@dataclass(frozen=True, kw_only=True)
class Saved:
    """Of a `Save`; one of path and sampling session is None."""

    type: Literal["save_weights", "save_weights_for_sampler", "save_weights_external"]
    """What was saved."""
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
    type: str = "load_weights"
    """As the client reads it."""


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
    top: TopTokens | None = None
    """The most likely tokens in the place of each; None: not wanted."""


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class TopTokens:
    """Tokens for each of n places, with log-probabilities of the model's whole distribution."""

    ids: np.ndarray
    """int32 [n, K]."""
    logprobs: np.ndarray
    """float32 [n, K]; NaN: none is known."""


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class PromptScores:
    """What the model says of the tokens of a prompt; where it says nothing, log-probabilities are NaN."""

    logprobs: np.ndarray
    """float32 [N]: log-probability of each token after those before it, NaN at the first."""
    top: TopTokens
    """[N, K]: the most likely tokens in each one's place, the likeliest first; K may be 0."""
    targets: SparseMatrix | None = None
    """float32: log-probabilities of the ids that were asked for, 0 where none was; None: not wanted."""
    drawn: TopTokens | None = None
    """[N - 1, k]: tokens drawn in the place of each but the first; None: not wanted."""

    def of_last(self, n: int | None) -> PromptScores:
        """Return the same of the last n tokens alone; None: of all."""
        known = np.arange(len(self.logprobs)) >= (0 if n is None else len(self.logprobs) - n)
        top = replace(self.top, logprobs=np.where(known[:, None], self.top.logprobs, np.nan))
        return replace(self, logprobs=np.where(known, self.logprobs, np.nan), top=top)


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


Result = ForwardBackwardResult | OptimStepResult | CreatedModel | Saved | LoadedWeights | SampleResult


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
