"""The report of a probe: checks with their limits, the cause of each error, and plain transformers as the baseline."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, final

Cause = Literal[
    "packing",
    "positions",
    "mask",
    "cache",
    "recurrent state",
    "router",
    "vision",
    "audio",
    "head",
    "loss count",
    "sample results",
    "not deterministic",
    "unknown",
]
"""The mechanism at fault. "not deterministic": packing is not at fault; the model alone returns different numbers when
it runs again. "unknown": no single mechanism shows the error."""

CheckPart = Literal["isolation", "equality", "mechanism", "work"]
Finding = Literal["ok", "leaks", "differs", "fails", "not deterministic", "syncs", "absent", "not counted"]
Verdict = Literal["exact", "leaks", "differs", "fails", "not deterministic"]

BAD: tuple[Finding, ...] = ("fails", "leaks", "differs", "not deterministic")
"""Findings that a packed row must not have, the worst first. A model that is not deterministic proves nothing."""


class UnsteadyError(ArithmeticError):
    """The model returns different numbers when it runs again."""


@final
@dataclass(frozen=True, kw_only=True)
class Check:
    """One line of the report."""

    part: CheckPart
    """isolation: change one sample and compare the others; equality: compare packed with alone; mechanism: check one
    mechanism by itself; work: count query-key pairs and host-device syncs."""
    name: str
    """The quantity, usually prefixed with its circumstance and a colon."""
    finding: Finding
    """ok; leaks; differs; fails (raised an error); not deterministic (differs without packing too); syncs (exact, but
    slowed down by host-device syncs); absent (the model has no such part); not counted."""
    value: float | None = None
    """The measured value: a fraction of the largest entry, or a count."""
    allowed: float | None = None
    """The limit of `value`."""
    cause: Cause | None = None
    """The mechanism at fault."""
    detail: str = ""
    """One sentence."""

    @classmethod
    def measured(
        cls,
        part: CheckPart,
        name: str,
        value: float,
        allowed: float,
        detail: str,
        *,
        finding: Finding = "differs",
        cause: Cause | None = None,
    ) -> Check:
        """Compare a number with its limit. `finding`, `cause` and `detail` apply if it is NaN or above the limit."""
        if value <= allowed:
            return cls(part=part, name=name, finding="ok", value=value, allowed=allowed)
        return cls(part=part, name=name, finding=finding, value=value, allowed=allowed, cause=cause, detail=detail)

    @classmethod
    def of_mechanism(cls, mechanism: Cause, value: float, allowed: float, detail: str) -> Check:
        """Compare a number that depends on one mechanism only with its limit."""
        return cls.measured("mechanism", mechanism, value, allowed, detail, cause=mechanism)

    @classmethod
    def wrong(cls, mechanism: Cause, detail: str, *, value: float | None = None, allowed: float | None = None) -> Check:
        """Report a mechanism that differs, with or without a count that shows it."""
        told: dict[str, Any] = {"cause": mechanism, "detail": detail, "value": value, "allowed": allowed}
        return cls(part="mechanism", name=mechanism, finding="differs", **told)

    @classmethod
    def raised(cls, part: CheckPart, name: str, error: Exception) -> Check:
        """Report the error that a check raised."""
        if isinstance(error, UnsteadyError):
            finding = "not deterministic"
            return cls(part=part, name=name, finding=finding, cause=finding, detail=str(error))
        return cls(part=part, name=name, finding="fails", detail=one_line(error))

    @property
    def is_bad(self) -> bool:
        """Whether a packed row must not have this finding."""
        return self.finding in BAD

    @property
    def rank(self) -> int:
        """0 for the worst finding; `len(BAD)` for all that a packed row may have."""
        return BAD.index(self.finding) if self.is_bad else len(BAD)


@final
@dataclass(frozen=True, kw_only=True)
class Baseline:
    """The result of plain transformers on the same samples."""

    name: str
    """The kind of input: one row or a padded batch, with its positions or mask."""
    verdict: Verdict
    """exact, or the problem found."""
    leak: float | None = None
    """The most that a sample's logits move when only other samples change, as a fraction of the largest logit."""
    logits: float | None = None
    """Largest error of the logits against the samples alone, as a fraction of the largest logit."""
    loss: float | None = None
    """Relative error of the loss against the samples alone."""
    pairs: int | None = None
    """Query-key pairs that one layer of the text model computes; None: not counted."""
    causes: tuple[Cause, ...] = ()
    """The mechanisms at fault."""
    detail: str = ""
    """The error, if the pass raised one."""


@final
@dataclass(frozen=True, kw_only=True)
class Report:
    """The result of `vlmpack.probe`."""

    model: str
    """Class name of the model."""
    family: str
    """`config.model_type`."""
    weights: str
    """The weights that were probed: "as given", or a tiny copy and why."""
    device: str
    """"cpu" or "cuda"."""
    dtype: str
    """Dtype of the weights."""
    attention: str
    """Name of the attention back-end that ran."""
    samples: tuple[str, ...]
    """Kind and length of each sample in the row."""
    row_tokens: int
    """Number of tokens in the row, gaps included."""
    checks: tuple[Check, ...]
    """Every check, good or bad."""
    circumstances: Mapping[str, str]
    """The circumstances in which the samples were packed: the word that prefixes names of checks → its title."""
    plain: tuple[Baseline, ...]
    """Plain transformers as the baseline. Its errors do not count in the verdict."""

    @property
    def verdict(self) -> Verdict:
        """The worst finding of all checks.

        exact; fails: a check raised an error; leaks: a sample depends on another one; differs: samples are isolated,
        but their results are not those of the samples alone; not deterministic: everything that could be compared is
        exact, but two runs of the model alone differ.
        """
        findings = {check.finding for check in self.checks}
        return next((bad for bad in BAD if bad in findings), "exact")  # pyright: ignore[reportReturnType]

    @property
    def causes(self) -> tuple[Cause, ...]:
        """The mechanisms at fault, each once; "unknown" if the row is wrong but no single mechanism shows it."""
        return causes_of(self.checks)

    def to_dict(self) -> dict[str, Any]:
        """Convert to plain values for JSON. JSON has no infinity, so the largest float replaces it."""
        return _finite({"verdict": self.verdict, "causes": list(self.causes), **asdict(self)})

    def __repr__(self) -> str:
        """Return the verdict, the causes, and one line for each check."""
        head = f"{self.model} ({self.weights}), {self.device}, {self.dtype}, {self.attention}: {self.verdict}"
        causes = [f"cause: {', '.join(self.causes)}"] if self.causes else []
        checks = [f"  {check.part:<10} {check.name:<40} {check.finding:<12} {check.detail}" for check in self.checks]
        return "\n".join(line.rstrip() for line in (head, *causes, *checks))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(part) for part in value]
    return min(value, sys.float_info.max) if isinstance(value, float) else value


def one_line(error: Exception) -> str:
    """Format an error in one line."""
    return f"{type(error).__name__}: {(str(error) or 'no message').splitlines()[0]}"


def causes_of(checks: Iterable[Check]) -> tuple[Cause, ...]:
    """List each mechanism at fault once, in the order of the checks."""
    bad = [check for check in checks if check.is_bad]
    causes: tuple[Cause, ...] = tuple(dict.fromkeys(check.cause for check in bad if check.cause is not None))
    return causes or (("unknown",) if bad else ())
