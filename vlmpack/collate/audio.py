"""Read the audio of a sample, from files or arrays, as log-mel frames and tokens of the processor's feature extractor.

    file ──PyAV──▶ array [n], at the processor's sampling rate
    array [n] ──processor, all of a sample in one call──▶ frames [1, mel, f], mask [1, f], tokens
    length n  ──counted─────────────────────────────────▶ tokens

All audios of a sample go through the processor in one call, as in the processor's own use. It may pad them to the
longest one, which affects the last frames of the others. Frames after an audio's end are removed; the mask excludes
them anyway.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vlmpack.collate.encoded import Visual
from vlmpack.collate.processor_metadata import ProcessorMetadata, parts_of
from vlmpack.data.messages import MediaRef
from vlmpack.data.videos import load_audio
from vlmpack.errors import ConfigError, SampleError

FEATURES, MASK = "input_features", "feature_attention_mask"
"""Names of the tensors of audio."""
LOUDEST = 4.0
"""Largest accepted value of an audio. Resampling goes a little beyond 1; integer samples go far beyond it."""
PADDED = "padded_to"
"""Option of a measured audio: the length in samples to which the processor pads it. Kept because truncation may later
remove the longest audio."""


@dataclass(frozen=True, kw_only=True)
class AudioReader:
    """Reads the audio of samples with the model's own processor."""

    processor: Any
    """The processor, with a feature extractor."""
    metadata: ProcessorMetadata
    """Its metadata."""

    def load_each(self, refs: Sequence[MediaRef]) -> tuple[Visual, ...]:
        """Convert the audios of a sample to log-mel frames, in order.

        Raises:
            SampleError: one of them cannot be used.
            ConfigError: the processor makes another number of frames or tokens than counted.
        """
        if not refs:
            return ()
        arrays = self._arrays(refs)
        width = refs[0].options.get(PADDED) or _longest(arrays)
        inputs, texts = self.processor._process_audio(arrays, **self._options | self._padding(width))
        frames = [int(mask.sum()) for mask in inputs[MASK]]
        runs = [text.count(self.metadata.audio_token) for text in texts]
        counted = self._frames(arrays, width)  # as for measured samples
        if counted != frames or [*map(self.tokens_of, counted)] != runs:
            made = f"{frames} frames and {runs} tokens of audios with {counted} frames"
            raise ConfigError(f"the {type(self.processor).__name__} makes {made}; use a supported transformers")
        return tuple(
            replace(_audio(values[:, :count][None].contiguous(), run), source=ref)
            for values, count, run, ref in zip(inputs[FEATURES], frames, runs, refs, strict=True)
        )

    def measure_each(self, refs: Sequence[MediaRef]) -> tuple[Visual, ...]:
        """Count the tokens of a sample's audios from their lengths.

        Raises:
            SampleError: one of them cannot be used.
        """
        arrays = self._arrays(refs)
        width = _longest(arrays)
        runs = map(self.tokens_of, self._frames(arrays, width))
        sources = [replace(ref, options={**ref.options, PADDED: width}) for ref in refs]
        return tuple(Visual(pixels=None, runs=(run,), source=ref) for run, ref in zip(runs, sources, strict=True))

    def read_tokenized(self, feature: Mapping[str, Any]) -> tuple[Visual, ...]:
        """Read the audios of a tokenized sample from its `input_features` and `feature_attention_mask`.

        Raises:
            SampleError: one of the two is missing, or the shapes differ from the processor's (`audio_shape`).
        """
        there = [name for name in (FEATURES, MASK) if feature.get(name) is not None]
        if not there:
            return ()
        if len(there) == 1:
            raise SampleError(f"it has {there[0]} alone; {FEATURES} and {MASK} come from one call", "audio_shape")
        features, mask = (torch.as_tensor(feature[name]) for name in (FEATURES, MASK))
        if features.ndim != 3 or features.shape[::2] != mask.shape or not features.is_floating_point():
            seen = f"{FEATURES} is {features.dtype} {list(features.shape)} and {MASK} {list(mask.shape)}"
            raise SampleError(
                f"{seen}; give floats [audios, mel bins, frames] and a mask [audios, frames]", "audio_shape"
            )
        kept = [values[:, of_audio.bool()] for values, of_audio in zip(features, mask, strict=True)]
        return tuple(_audio(values[None], self.tokens_of(values.shape[1])) for values in kept)

    def tokens_of(self, frames: int) -> int:
        """Count the tokens that the processor writes for an audio of this many frames."""
        module = import_module(type(self.processor).__mro__[self._depth].__module__)
        return int(module._get_feat_extract_output_lengths(torch.tensor([frames]))[0])

    # ------------------------------------------------------------------ one audio

    def _arrays(self, refs: Sequence[MediaRef]) -> list[np.ndarray]:
        """Return each audio of a sample as float32 [n].

        Raises:
            SampleError: one of them cannot be used, or is too short for a token.
        """
        arrays = [self._array(ref) for ref in refs]
        for ref, array, frames in zip(refs, arrays, self._frames(arrays, _longest(arrays)), strict=True):
            if self.tokens_of(frames) < 1:
                raise SampleError(f"audio {ref.index} has {len(array)} samples, too few for one token", "audio_source")
        # the spectrogram mirrors the start over half a window, unless silence follows the audio
        least = self._extractor.n_fft // 2 + 1 if arrays and self._pads_to_longest else 0
        if arrays and (longest := _longest(arrays)) < least:
            at = refs[int(np.argmax([*map(len, arrays)]))].index
            seen = f"audio {at}, the longest, has {longest} samples, but the processor's spectrum takes {least}"
            raise SampleError(f"{seen}; lengthen it with silence", "audio_source")
        return arrays

    def _array(self, ref: MediaRef) -> np.ndarray:
        """Return one audio as float32 [n].

        Raises:
            SampleError: it is not a single-channel array at the processor's sampling rate, or its values or its length
                are out of range.
        """
        source, rate, at = ref.source, ref.options.get("sampling_rate"), ref.index
        if isinstance(source, Mapping) and source.get("array") is not None:
            source, rate = source["array"], source.get("sampling_rate", rate)
        elif isinstance(source, str | bytes | Path | Mapping):
            try:
                source, rate = load_audio(source, rate=self._extractor.sampling_rate), None
            except SampleError as error:
                raise ref.named(error) from error
        if not np.shape(source):
            fault = f"audio {at} is a {type(source).__name__}; give a file, an array [n], or datasets.Audio's mapping"
            raise SampleError(fault, "audio_source")
        array = np.asarray(source)
        if array.ndim != 1 or array.dtype.kind != "f" or not np.isfinite(array).all():
            seen = f"{array.dtype} {list(array.shape)}"
            raise SampleError(f"audio {at} is {seen}; it must be finite floats [n] of one channel", "audio_source")
        if len(array) and np.abs(array).max() > LOUDEST:
            most = np.abs(array).max()
            raise SampleError(
                f"audio {at} has values up to {most:.6g}, beyond -1 ... 1; divide 16-bit by 32768", "audio_source"
            )
        extractor = self._extractor
        if rate is not None and rate != extractor.sampling_rate:
            seen = f"audio {at} has a sampling rate of {rate}, but its processor takes {extractor.sampling_rate}"
            raise SampleError(f"{seen}; resample it (cast_column, datasets.Audio(sampling_rate=...))", "audio_rate")
        # WhisperFeatureExtractor truncates long audio unless told not to
        if self._options.get("truncation", True) and len(array) > extractor.n_samples:
            lasts, most = (count / extractor.sampling_rate for count in (len(array), extractor.n_samples))
            seen = f"audio {at} lasts {lasts:.1f} s, but the processor cuts off what is beyond {most:.0f} s"
            raise SampleError(f"{seen}; cut it into parts", "audio_too_long")
        return array.astype(np.float32)

    def _padding(self, longest: int) -> dict[str, Any]:
        """Return the options that set the padded length in samples.

        That is the longest audio. If the processor would pad to its maximum instead, it is as many samples as the last
        frames need. Silence after an audio changes none of its frames, and Qwen2.5-Omni's processor would compute five
        minutes of it.
        """
        extractor = self._extractor
        if self._pads_to_longest:
            return {"padding": "max_length", "max_length": longest}
        hops = -(-(longest + extractor.n_fft) // extractor.hop_length)
        return {"max_length": min(hops * extractor.hop_length, extractor.n_samples)}

    def _frames(self, arrays: Sequence[np.ndarray], longest: int) -> list[int]:
        """Count the frames of a sample's audios, partial ones included, up to the last whole frame of the call."""
        if not arrays:
            return []
        extractor = self._extractor
        width = longest if self._pads_to_longest else extractor.n_samples
        return [min(-(-len(array) // extractor.hop_length), width // extractor.hop_length) for array in arrays]

    # ------------------------------------------------------------------ the processor

    @cached_property
    def _extractor(self) -> Any:
        extractor = parts_of(self.processor).feature_extractor
        if extractor is None:
            name = type(self.processor).__name__
            raise ConfigError(f"this {name} has no feature extractor; load it with vlmpack.data.load_processor")
        return extractor

    @cached_property
    def _depth(self) -> int:
        """Index of transformers' own class among the classes of the processor."""
        return next(at for at, cls in enumerate(type(self.processor).__mro__) if "transformers." in cls.__module__)

    @cached_property
    def _options(self) -> dict[str, Any]:
        tokenizer = parts_of(self.processor).tokenizer
        merged = self.processor._merge_kwargs(tokenizer_init_kwargs=tokenizer.init_kwargs, return_tensors="pt")
        return merged["audio_kwargs"]

    @cached_property
    def _pads_to_longest(self) -> bool:
        """True: the processor pads the audios of a call to the longest one. False: to its maximum length."""
        return self._options.get("padding") in (True, "longest")


def _longest(arrays: Sequence[np.ndarray]) -> int:
    return max(map(len, arrays), default=0)


def _audio(features: torch.Tensor, tokens: int) -> Visual:
    """Make the record of one audio from its frames [1, mel, f]."""
    mask = torch.ones(1, features.shape[2], dtype=torch.int64)
    return Visual(pixels=features, tensors={MASK: mask}, runs=(tokens,))
