"""Files of plans that were damaged: always told as damage, with the file's name."""

from __future__ import annotations

import numpy as np
import pytest

from vlmpack.errors import ConfigError, LayoutError
from vlmpack.plan import Budget, Plan, plan_bins


def made() -> Plan:
    """A plan with everything that can be saved: a budget, dropped samples, a seed."""
    budget = Budget(name="patches", costs=np.asarray([4, 0, 8, 30, 0, 12]), limit=16)
    return plan_bins([5, 3, 4, 2, 6, 7], 10, budgets=[budget], oversize="drop", seed=3)


def entry(data: bytes, field: int, number: int) -> bytes:
    """The file with two bytes of its last member's entry in the directory of the zip set to a number."""
    at = data.rindex(b"PK\x01\x02") + field
    return data[:at] + number.to_bytes(2, "little") + data[at + 2 :]


@pytest.mark.parametrize(
    ("damage", "seen"),
    [
        (lambda data: entry(data, 6, 99), "zip file version 9.9"),
        (lambda data: entry(data, 8, 1), "encrypted"),
        (lambda data: entry(data, 8, 32), "patched"),
        (lambda data: entry(data, 10, 77), "compression method"),
        (lambda data: entry(data, 10, 8), ""),  # zlib is given what is not compressed
        (lambda data: entry(data, 44, 65535), ""),  # the member lies behind the end of the file
        (lambda data: data[: (at := data.rindex(b"PK\x05\x06") + 12)] + bytes(1) + data[at + 1 :], ""),
    ],
)
def test_damage_to_the_directory_of_the_file_is_told_as_damage(damage, seen, tmp_path):
    made().save(tmp_path / "rows.plan")
    damaged = damage((tmp_path / "rows.plan").read_bytes())
    (tmp_path / "rows.plan").write_bytes(damaged)
    with pytest.raises(LayoutError, match=rf"rows.plan is damaged \(.*{seen}.*\); write it again"):
        Plan.load(tmp_path / "rows.plan")


def test_any_damage_is_found_and_no_error_is_raw(tmp_path):
    made().save(tmp_path / "rows.plan")
    whole = (tmp_path / "rows.plan").read_bytes()
    rng = np.random.default_rng(0)
    seen = set()
    for _ in range(600):
        data = bytearray(whole)
        data[rng.integers(len(data))] = rng.integers(256)
        (tmp_path / "rows.plan").write_bytes(data[: rng.integers(len(data))] if rng.random() < 0.2 else data)
        try:
            assert Plan.load(tmp_path / "rows.plan") == made()  # a byte that says nothing
            seen.add("same")
        except (ConfigError, LayoutError) as error:
            seen.add(type(error).__name__)
    assert seen == {"same", "ConfigError", "LayoutError"}
