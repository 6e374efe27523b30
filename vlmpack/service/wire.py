"""Bodies to requests and outcomes to bodies: JSON here, protobuf in its own file.

A field that is null counts as absent. Fields that this service does not know are ignored where they describe a request,
as newer clients send more of them, and refused where they are settings: to ignore one would change results in silence.
"""

from __future__ import annotations

import base64
import binascii
import json
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from math import inf, isfinite
from typing import Any, final

import numpy as np

from vlmpack.errors import RequestError
from vlmpack.service import messages, protobuf

JSON, PROTOBUF = "application/json", "application/x-protobuf"
INT32, INT64 = 2**31 - 1, 2**63 - 1
TTL = 10 * 366 * 86_400
"""Most seconds until a checkpoint expires: ten years, as the client's documents say."""
MOST_TOP = 256
"""Most tokens whose log-probabilities are returned for a place of a prompt."""
METADATA_CHARACTERS = 16_384
"""Most characters of the notes that a client attaches to a session, model or checkpoint."""

ADAM_DEFAULTS = {
    "learning_rate": 1e-4,
    "beta1": 0.9,
    "beta2": 0.95,
    "eps": 1e-12,
    "weight_decay": 0.0,
    "grad_clip_norm": 0.0,
}
"""The client's own."""

NOT_SAMPLED = {
    "topk_sample_logprobs": "only those of the sampled tokens are computed",
    "target_prompt_logprobs": "score each continuation with compute_logprobs",
    "prompt_alt_tokens_k": "sample after each beginning of the prompt",
    "record_stability_info": "it is for stable_reinforce, whose formula is not published; leave it out, and train with "
    "importance_sampling, ppo, cispo or gspo",
}
"""Settings of a sampling request that this service does not have, and what to do instead."""


# ---------------------------------------------------------------------- fields of a JSON object


@final
@dataclass(frozen=True, kw_only=True)
class Fields:
    """A JSON object, of which every field is read with its type and bounds."""

    values: Mapping[str, Any]
    """Its fields, those that are null left out."""
    nulls: frozenset[str] = frozenset()
    """Names of the fields that are null."""
    place: str = ""
    """Where it stands in the body, for errors."""

    @classmethod
    def parse(cls, body: bytes) -> Fields:
        """Parse a body.

        Raises:
            RequestError: it is not a JSON object in UTF-8, or nested too deeply.
        """
        try:
            values = json.loads(body.decode("utf-8"), parse_constant=_refuse_constant)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"the body is not JSON ({error}): send an object in UTF-8") from error
        return cls.of(values, "the body")

    @classmethod
    def of(cls, value: Any, place: str) -> Fields:
        """Wrap a parsed value."""
        if not isinstance(value, dict):
            raise RequestError(f"{place}: {_shown(value)}; an object is needed")
        kept = {key: entry for key, entry in value.items() if entry is not None}
        nulls = frozenset(value.keys() - kept.keys())
        return cls(values=kept, nulls=nulls, place="" if place == "the body" else f"{place}.")

    def __contains__(self, name: str) -> bool:
        return name in self.values

    def _get(self, name: str, default: Any) -> Any:
        value = self.values.get(name, default)
        if value is ...:
            raise RequestError(f"{self.place}{name}: absent or null; it is needed (NaN and infinity arrive as null)")
        return value

    def text(self, name: str, default: Any = ...) -> Any:
        """Return a text."""
        value = self._get(name, default)
        return value if value is default else check_text(value, f"{self.place}{name}")

    def integer(self, name: str, default: Any = ..., *, low: int = 0, high: int = INT32) -> Any:
        """Return a whole number between bounds."""
        value = self._get(name, default)
        if value is default:
            return value
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise RequestError(f"{self.place}{name}: {_shown(value)}; a whole number from {low} to {high} is needed")
        return value

    def number(
        self, name: str, default: Any = ..., *, low: float = -inf, high: float = inf, nullable: bool = True
    ) -> float:
        """Return a finite number between bounds."""
        value = self._get(name, default if nullable or name not in self.nulls else ...)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if (
            not is_number or not -sys.float_info.max <= value <= sys.float_info.max
        ):  # compares whole numbers that no float can hold, too
            raise RequestError(f"{self.place}{name}: {_shown(value)}; a finite number is needed")
        if not low <= value <= high:
            raise RequestError(f"{self.place}{name}: {value}; a number from {low} to {high} is needed")
        return float(value)

    def flag(self, name: str, default: Any = ...) -> bool:
        """Return a boolean."""
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise RequestError(f"{self.place}{name}: {_shown(value)}; true or false is needed")
        return value

    def inner(self, name: str) -> Fields:
        """Return an object within this one."""
        return Fields.of(self._get(name, ...), f"{self.place}{name}")

    def array(self, name: str, default: Any = ...) -> list[Any]:
        """Return a list."""
        value = self._get(name, default)
        if not isinstance(value, list):
            raise RequestError(f"{self.place}{name}: {_shown(value)}; a list is needed")
        return value

    def metadata(self) -> dict[str, str]:
        """Return the client's own notes; what is not a text becomes one as JSON."""
        if "user_metadata" not in self:
            return {}
        notes = {
            check_text(key, "user_metadata"): check_text(value, "user_metadata")
            if isinstance(value, str)
            else json.dumps(value)
            for key, value in self.inner("user_metadata").values.items()
        }
        if sum(len(key) + len(value) for key, value in notes.items()) > METADATA_CHARACTERS:
            raise RequestError(f"user_metadata: more than {METADATA_CHARACTERS} characters")
        return notes

    def ttl(self) -> int | None:
        """Return the seconds after which a checkpoint is deleted; None: it stays."""
        return self.integer("ttl_seconds", None, low=1, high=TTL)

    def refuse_others(self, known: Collection[str]) -> None:
        """Raise for settings that this service does not know."""
        others = sorted(set(self.values) - set(known))
        if others:
            raise RequestError(
                f"{self.place}{others[0]}: not a setting of this service; it has {', '.join(sorted(known))}"
            )


def check_text(value: Any, place: str) -> str:
    """Return a text that UTF-8 can encode."""
    if not isinstance(value, str):
        raise RequestError(f"{place}: {_shown(value)}; a text is needed")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(f"{place}: a text with half a character (a lone surrogate)") from error
    return value


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _shown(value: Any) -> str:
    text = ascii(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


# ---------------------------------------------------------------------- requests


def decode(kind: str, body: bytes) -> messages.Request:
    """Parse a body that was accepted before.

    Args:
        kind: name of the request's class.
        body: of the request.

    Raises:
        RequestError: it cannot be read, or asks for what this service does not do.
    """
    if kind == "ForwardBackward":
        return protobuf.decode_forward_backward(body)
    return READERS[kind](Fields.parse(body))


def _numbered(fields: Fields) -> dict[str, Any]:
    """Fields that every operation of a model has."""
    return {"model_id": fields.text("model_id"), "seq_id": fields.integer("seq_id", low=1)}


def _optim_step(fields: Fields) -> messages.OptimStep:
    if "optimizer_params" in fields:
        raise RequestError(
            f"optimizer_params {_shown(fields.values['optimizer_params'])}: this service has AdamW alone"
        )
    adam = fields.inner("adam_params")
    adam.refuse_others(ADAM_DEFAULTS)
    numbers = {
        name: adam.number(name, default, low=-inf if name == "grad_clip_norm" else 0.0, nullable=False)
        for name, default in ADAM_DEFAULTS.items()
    }
    for name in ("beta1", "beta2"):
        if numbers[name] >= 1:
            raise RequestError(f"adam_params.{name}: {numbers[name]}; a number below 1 is needed")
    if np.float32(numbers["eps"]) == 0:
        raise RequestError(
            f"adam_params: eps is {numbers['eps']}, which is 0 in float32, so that a step without a gradient would be "
            "0 / 0; send 1e-12 or more"
        )
    numbers["grad_clip_norm"] = max(numbers["grad_clip_norm"], 0.0)  # the client's documents: not above 0 is off
    return messages.OptimStep(**_numbered(fields), adam=messages.AdamParams(**numbers))


def _save_weights(fields: Fields) -> messages.SaveWeights:
    return messages.SaveWeights(
        **_numbered(fields),
        name=fields.text("path"),
        overwrite=fields.flag("overwrite", False),
        user_metadata=fields.metadata(),
        ttl_seconds=fields.ttl(),
    )


def _save_for_sampler(fields: Fields) -> messages.SaveForSampler:
    name = fields.text("path", None)
    kind = fields.text("kind", "snapshot")
    if kind not in ("snapshot", "inflight"):
        raise RequestError(f"kind {_shown(kind)}: this service saves snapshots")
    number = fields.integer("sampling_session_seq_id", None, high=INT64)
    if name is None and number is None:
        raise RequestError("neither path nor sampling_session_seq_id: send the name of the snapshot as path")
    return messages.SaveForSampler(
        **_numbered(fields),
        name=name,
        sampling_session_seq_id=number if name is None else None,
        user_metadata=fields.metadata(),
        ttl_seconds=fields.ttl(),
    )


def _save_external(fields: Fields) -> messages.SaveExternal:
    if "age_encryption_recipients" in fields:
        raise RequestError("age_encryption_recipients: files are stored as they are; encrypt what you download")
    return messages.SaveExternal(
        **_numbered(fields),
        name=fields.text("path"),
        user_metadata=fields.metadata(),
        ttl_seconds=fields.ttl(),
    )


def _load_weights(fields: Fields) -> messages.LoadWeights:
    refuse_access_token(fields)
    return messages.LoadWeights(
        **_numbered(fields),
        path=fields.text("path"),
        optimizer=fields.flag("optimizer"),
    )


def refuse_access_token(fields: Fields) -> None:
    """Raise for a token that would open the checkpoints of another account."""
    if "weights_access_token" in fields:
        raise RequestError("weights_access_token: the key opens all checkpoints of this service; leave it out")


def _refuse_other_optimizers(fields: Fields) -> None:
    if "optimizer_config" in fields and (kind := fields.inner("optimizer_config").text("type")) != "adamw":
        raise RequestError(f"optimizer_config.type {_shown(kind)}: this service has adamw alone")


def _create_model(fields: Fields) -> messages.CreateModel:
    _refuse_other_optimizers(fields)
    return messages.CreateModel(
        session_id=fields.text("session_id"),
        model_seq_id=fields.integer("model_seq_id"),
        base_model=fields.text("base_model"),
        lora=_lora(fields.inner("lora_config")) if "lora_config" in fields else None,  # None: all weights
        user_metadata=fields.metadata(),
    )


def _lora(fields: Fields) -> messages.LoraConfig | None:
    """Return the settings of an adapter; None: rank 0, by which the client, as of SkyRL, asks for all weights."""
    targets = ("train_unembed", "train_mlp", "train_attn")
    fields.refuse_others(("rank", "seed", *targets))
    chosen = {name: fields.flag(name, True) for name in targets}
    if not any(chosen.values()):
        raise RequestError("lora_config: no part of the model is trained; set one of " + ", ".join(targets))
    rank, seed = fields.integer("rank"), fields.integer("seed", None, low=-INT64 - 1, high=INT64)
    if rank == 0 and not all(chosen.values()):
        raise RequestError(
            "lora_config: rank 0 trains all weights; leave " + ", ".join(targets) + " out, or set a rank"
        )
    return messages.LoraConfig(rank=rank, seed=seed, **chosen) if rank else None


def _create_from_checkpoint(fields: Fields) -> messages.CreateFromCheckpoint:
    _refuse_other_optimizers(fields)
    refuse_access_token(fields)
    return messages.CreateFromCheckpoint(
        session_id=fields.text("session_id"),
        model_seq_id=fields.integer("model_seq_id"),
        path=fields.text("path"),
        optimizer=fields.flag("optimizer"),
        base_model=fields.text("base_model", None),
        user_metadata=fields.metadata(),
    )


def _sample(fields: Fields) -> messages.Sample:
    for name, remedy in NOT_SAMPLED.items():
        if fields.values.get(name, 0) not in (0, False):
            raise RequestError(f"{name} {_shown(fields.values[name])}: this service does not have it; {remedy}")
    return messages.Sample(
        sampling_session_id=fields.text("sampling_session_id"),
        seq_id=fields.integer("seq_id", high=INT64),
        prompt=tuple(
            _chunk(Fields.of(chunk, f"prompt chunk {index}"))
            for index, chunk in enumerate(fields.inner("prompt").array("chunks"))
        ),
        num_samples=fields.integer("num_samples", 1, low=1),
        params=_sampling_params(fields.inner("sampling_params")),
        prompt_logprobs=fields.flag("prompt_logprobs", False),
        topk_prompt_logprobs=fields.integer("topk_prompt_logprobs", 0, high=MOST_TOP),
        prompt_logprobs_last_n=fields.integer("prompt_logprobs_last_n", None, low=1),
    )


def _chunk(fields: Fields) -> messages.Chunk:
    kind = fields.text("type")
    if kind == "encoded_text":
        tokens = fields.array("tokens")
        if not all(type(token) is int and abs(token) <= INT32 for token in tokens):
            raise RequestError(f"{fields.place}tokens: something else than token ids, which are whole numbers")
        return messages.TextChunk(tokens=np.array(tokens, dtype=np.int32))
    if kind == "image":
        try:
            data = base64.b64decode(fields.text("data"), validate=True)
        except (binascii.Error, ValueError) as error:
            raise RequestError(f"{fields.place}data: not base64 ({error})") from error
        expected = fields.integer("expected_tokens", None)
        return messages.ImageChunk(data=data, format=fields.text("format"), expected_tokens=expected)
    if kind == "image_asset_pointer":
        raise RequestError(f"{fields.place}location: this service fetches nothing; send the image's bytes (ImageChunk)")
    raise RequestError(f"{fields.place}type {_shown(kind)}: this service takes text and images")


def _sampling_params(fields: Fields) -> messages.SamplingParams:
    fields.refuse_others(("max_tokens", "seed", "stop", "temperature", "top_k", "top_p"))
    top_k = fields.integer("top_k", -1, low=-1)
    if (top_p := fields.number("top_p", 1.0, low=0.0, high=1.0)) == 0:
        raise RequestError("sampling_params.top_p 0: no token is left; a number above 0 is needed")
    stop = fields.values.get("stop")
    texts = [stop] if isinstance(stop, str) else [text for text in stop or () if isinstance(text, str)]
    if stop is not None and not isinstance(stop, str):
        ids = [token for token in fields.array("stop") if type(token) is int and 0 <= token <= INT32]
        if len(ids) + len(texts) < len(stop) or (ids and texts):
            raise RequestError("sampling_params.stop: token ids, or texts, but not both, are needed")
    else:
        ids = []
    if any(not check_text(text, "sampling_params.stop") for text in texts):
        raise RequestError("sampling_params.stop: an empty text stops everything")
    return messages.SamplingParams(
        max_tokens=fields.integer("max_tokens", None, low=1),
        seed=fields.integer("seed", None, low=-INT64 - 1, high=INT64),
        temperature=fields.number("temperature", 1.0, low=0.0),
        top_k=top_k or -1,
        top_p=top_p,
        stop_tokens=None if stop is None else tuple(ids),
        stop_strings=tuple(texts),
    )


READERS: Mapping[str, Callable[[Fields], messages.Request]] = {
    "OptimStep": _optim_step,
    "SaveWeights": _save_weights,
    "SaveForSampler": _save_for_sampler,
    "SaveExternal": _save_external,
    "LoadWeights": _load_weights,
    "CreateModel": _create_model,
    "CreateFromCheckpoint": _create_from_checkpoint,
    "Sample": _sample,
}
"""Reader of each kind of request that arrives as JSON."""


# ---------------------------------------------------------------------- outcomes


def encode(outcome: messages.Outcome) -> messages.Reply:
    """Encode a result or a failure as the client expects it."""
    if isinstance(outcome, messages.ForwardBackwardResult | messages.SampleResult):
        return messages.Reply(content_type=PROTOBUF, body=protobuf.encode_result(outcome))
    return messages.Reply(content_type=JSON, body=to_json(_plain(outcome)))


def _plain(outcome: messages.Outcome) -> dict[str, Any]:
    match outcome:
        case messages.Failure():
            return {"error": outcome.message, "category": outcome.category}
        case messages.OptimStepResult():
            metrics = {name: value for name, value in outcome.metrics.items() if isfinite(value)}
            return {"metrics": metrics, "type": "optim_step"}
        case messages.CreatedModel():
            return {"model_id": outcome.model_id, "type": "create_model"}
        case messages.SavedWeights():
            kind = "save_weights_external" if outcome.is_external else "save_weights"
            return {"path": outcome.path, "type": kind}
        case messages.SavedForSampler():
            session = outcome.sampling_session_id
            extra = {} if session is None else {"sampling_session_id": session}
            return {"path": outcome.path, **extra, "type": "save_weights_for_sampler"}
        case messages.LoadedWeights():
            extra = {} if outcome.model_id is None else {"model_id": outcome.model_id}
            return {"path": outcome.path, **extra, "type": "load_weights"}
    raise AssertionError(f"{type(outcome).__name__} is encoded as protobuf")


def to_json(value: Mapping[str, Any]) -> bytes:
    """Encode an object."""
    return json.dumps(value, allow_nan=False).encode("utf-8")
