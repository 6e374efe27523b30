"""Accidents, drawn from a seed: bits that flip, files that end too early, fields that are gone, swapped or changed."""

from __future__ import annotations

import copy
import random
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from vlmpack.errors import VlmpackError

KINDS = (None, True, False, -1, 0, 1, 3, 2**31, 2**70, 0.5, float("nan"), "", "0", "../x", [], {}, [[]], {"a": 1}, b"x")
PATIENCE = 20
"""Seconds after which a case counts as hanging."""


class Hang(BaseException):
    """A case that takes too long."""


def damaged(data: bytes, rng: random.Random) -> bytes:
    """A file with bits flipped, bytes overwritten, cut out or put in, or its end lost."""
    if not data:
        return rng.randbytes(9)
    out, at = bytearray(data), rng.randrange(len(data))
    match rng.randrange(6):
        case 0 | 1:
            for _ in range(rng.choice((1, 1, 1, 8))):
                at = rng.randrange(len(out))
                out[at] ^= 1 << rng.randrange(8)
        case 2:
            length = rng.randrange(1, 64)
            out[at : at + length] = rng.randbytes(length)
        case 3:
            del out[at:]
        case 4:
            del out[at : at + rng.randrange(1, 64)]
        case _:
            out[at:at] = rng.randbytes(rng.randrange(1, 64))
    return bytes(out)


def edited(value: Any, rng: random.Random) -> Any:
    """A structure with one thing in it changed."""
    value = copy.deepcopy(value)
    holder, key = rng.choice(list(_places(value)))
    match rng.randrange(6):
        case 0:
            del holder[key]
        case 1 | 2 if isinstance(holder[key], int):
            holder[key] += rng.choice((-1, 1, 7))
        case 3 if isinstance(holder[key], str) and holder[key]:
            holder[key] = holder[key][:-1] + rng.choice("abc019")
        case 4:
            other, name = rng.choice(list(_places(value)))
            holder[key], other[name] = copy.deepcopy(other[name]), copy.deepcopy(holder[key])
        case _ if isinstance(holder, list):
            holder.insert(key, copy.deepcopy(holder[key]))
        case _:
            holder[key] = rng.choice(KINDS)
    return value


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """(container, key) of everything in a structure."""
    if isinstance(value, dict | list):
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            yield value, key
            yield from _places(value[key])


def outcomes(cases: int, seed: int, case: Callable[[random.Random], bool]) -> Counter[str]:
    """Run so many cases, each with a generator of its own.

    Args:
        cases: how many.
        seed: of all of them.
        case: computes whether the outcome equals that without the accident; it may raise.

    Returns:
        How many were the "same", "refused" by a VlmpackError, "wrong", a "crash" or a "hang"; the last three with the
        number of the case.
    """
    found: Counter[str] = Counter()
    for number in range(cases):
        try:
            with _limited():
                found["same" if case(random.Random(seed * 1_000_003 + number)) else f"wrong in case {number}"] += 1
        except VlmpackError:
            found["refused"] += 1
        except Hang:
            found[f"hang in case {number}"] += 1
        except Exception as error:
            found[f"crash in case {number}: {type(error).__name__}: {error}"[:300]] += 1
    return found


@contextmanager
def _limited() -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise Hang

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, PATIENCE)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def check(found: Counter[str], *, cases: int) -> None:
    """Nothing but the same rows or a refusal, and enough of both that the accidents were some."""
    assert set(found) == {"same", "refused"}, found
    assert found.total() == cases
    assert found["refused"] > cases / 4
