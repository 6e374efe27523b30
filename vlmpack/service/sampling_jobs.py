"""Sampling requests in the built-in engine: the sequences of each, when they end, and checks of its settings."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isfinite
from secrets import randbits
from typing import final

import numpy as np

from vlmpack.errors import RequestError
from vlmpack.service.datums import EncodedSequence
from vlmpack.service.generation import Ending, Growing
from vlmpack.service.messages import Failure, Sample, SampleResult, SamplingParams


@final
@dataclass(frozen=True, kw_only=True)
class SampledModel:
    """Properties of the model that the built-in engine needs beside its weights."""

    max_context: int
    """Longest sequence that the model reads."""
    eos_token_ids: tuple[int, ...]
    """Ids that end a sequence, unless a request has an empty list of stops."""
    decode: Callable[[Sequence[int]], str] | None = None
    """Token ids to text, special tokens included; None: stop strings are refused."""


@final
class Job:
    """One request and its sequences."""

    def __init__(self, key: str, session_id: str, prompt: EncodedSequence, request: Sample) -> None:
        self.key = key
        """Of the request."""
        self.session_id = session_id
        """Of its sampling session."""
        self.prompt = prompt
        """The prompt that it samples after."""
        self.request = request
        """The request."""
        self.waiting: deque[Growing] = deque()
        """Sequences that have not begun."""
        self.sequences: tuple[Growing, ...] = ()
        """All of them, in the order of their seeds."""
        self.prompt_logprobs: np.ndarray | None = None
        """float32 [N]; None: not wanted, or not yet computed."""
        self.is_cached = False
        """True if another request had its prompt computed."""
        self.unfinished = 0
        """Sequences that are not done."""
        self.is_alone = False
        """True if it runs by itself, as it failed together with others."""

    @property
    def needs_scores(self) -> bool:
        """Return whether the log-probabilities of its prompt are still to be computed."""
        return self.request.prompt_logprobs and self.prompt_logprobs is None

    @property
    def ends_at_once(self) -> bool:
        """Return whether each sequence is one token."""
        return self.sequences[0].ending.max_tokens == 1

    def begin(self, ending: Ending) -> None:
        """Make its sequences anew, none of them begun."""
        params = self.request.params
        seed = randbits(63) if params.seed is None else params.seed
        self.sequences = tuple(
            Growing(self.prompt, params, ending, seed=seed + i, key=self.key, is_alone=self.is_alone)
            for i in range(self.request.num_samples)
        )
        self.waiting = deque(self.sequences)
        self.unfinished = len(self.sequences)

    def outcome(self) -> SampleResult | Failure:
        """Its result."""
        for sequence in self.sequences:
            if sequence.error is not None:
                return Failure(message=sequence.error, category="server")
        results = tuple(sequence.result() for sequence in self.sequences)
        hits = self.prompt.length if self.is_cached else 0
        return SampleResult(sequences=results, prompt_logprobs=self.prompt_logprobs, prompt_cache_hit_tokens=hits)


def ending_of(prompt: EncodedSequence, request: Sample, model: SampledModel) -> Ending:
    """Return when sequences of a request end.

    Raises:
        RequestError: settings that cannot be, or that the model's context has no room for.
    """
    params, room = request.params, model.max_context - prompt.length + 1  # the last token is not read again
    check_params(params, request.num_samples)
    if not prompt.length:
        raise RequestError("the prompt has no tokens; begin with one at least")
    if room < 1:
        raise RequestError(
            f"the prompt has {prompt.length} tokens, but the model reads {model.max_context}; shorten it"
        )
    if params.max_tokens is not None and params.max_tokens > room:
        raise RequestError(
            f"the prompt has {prompt.length} tokens and max_tokens is {params.max_tokens}, but the model reads "
            f"{model.max_context} tokens; leave max_tokens out, or set it to {room} at most"
        )
    if params.stop_strings and model.decode is None:
        raise RequestError("this server has no tokenizer for stop strings; give the ids of tokens in stop")
    is_endless = params.stop_tokens == () and not params.stop_strings
    return Ending(
        stop_tokens=frozenset(() if is_endless else (*model.eos_token_ids, *(params.stop_tokens or ()))),
        stop_strings=params.stop_strings,
        max_tokens=params.max_tokens or max(room - 1, 1),
        decode=model.decode,
    )


def check_params(params: SamplingParams, num_samples: int) -> None:
    """Check the settings of a request by themselves.

    Raises:
        RequestError: one that cannot be.
    """
    wrong = {
        f"num_samples is {num_samples}; it is 1 or more": num_samples < 1,
        f"max_tokens is {params.max_tokens}; it is 1 or more, or left out": (params.max_tokens or 1) < 1
        or params.max_tokens == 0,
        f"temperature is {params.temperature}; it is 0 (greedy) or a positive number": not isfinite(params.temperature)
        or params.temperature < 0,
        f"top_k is {params.top_k}; it is -1 (all) or the number of tokens to choose among": params.top_k < -1
        or params.top_k == 0,
        f"top_p is {params.top_p}; it is above 0 and at most 1": not 0 < params.top_p <= 1,
        "a stop string is empty; leave it out": "" in params.stop_strings,
    }
    for message, is_wrong in wrong.items():
        if is_wrong:
            raise RequestError(message)
