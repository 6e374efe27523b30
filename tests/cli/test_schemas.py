"""What verbs print with `--json` fits their schemas, field by field, and the schemas describe every field."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator, ValidationError
from typer.testing import CliRunner

from vlmpack.cli import app
from vlmpack.cli.schemas import SCHEMAS

PAGE = Path(__file__).parents[2] / "docs" / "command.md"
CHAT = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]
BEFORE = "The rules of the shop are long, and each question about them begins alike, whoever asks it. " * 3


def run(*arguments: object, status: int = 0) -> Any:
    """The JSON that the command prints with `--json`, and nothing beside it."""
    done = CliRunner().invoke(app, [*map(str, arguments), "--json"])
    assert done.exit_code == status, done.output
    return json.loads(done.stdout)


def schema_of(verb: str) -> dict[str, Any]:
    return json.loads(CliRunner().invoke(app, ["schema", verb]).stdout)


def check(verb: str, printed: Any) -> None:
    Draft202012Validator(schema_of(verb)).validate(printed)


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    """Samples that begin alike, one that is too long for a row, and a line that cannot be read."""
    asked = [[{"role": "user", "content": BEFORE + end}, CHAT[1]] for end in ("Why?", "When?")]
    longest = [{"role": "user", "content": "again " * 900}, CHAT[1]]
    rows = "".join(json.dumps({"messages": row}) + "\n" for row in [CHAT, *asked, longest])
    path = tmp_path / "chats.jsonl"
    path.write_text(rows + "no JSON\n")
    return path


def parts(schema: Any) -> Iterator[dict[str, Any]]:
    """Every schema inside a schema."""
    yield schema
    for part in [*schema.get("properties", {}).values(), schema.get("items"), schema.get("additionalProperties")]:
        if isinstance(part, dict):
            yield from parts(part)


@pytest.mark.parametrize("verb", SCHEMAS)
def test_a_schema_is_one_and_describes_every_field(verb: str) -> None:
    schema = schema_of(verb)
    Draft202012Validator.check_schema(schema)
    for part in parts(schema):
        assert part.get("description") or part == {"type": "integer", "minimum": -1}
        if "properties" in part:
            assert part["required"] == list(part["properties"]) and part["additionalProperties"] is False


@pytest.mark.parametrize("verb", SCHEMAS)
def test_the_page_lists_the_fields_of_each_object(verb: str) -> None:
    (row,) = re.findall(rf"^\| `{verb}` \| (.*) \|$", PAGE.read_text(), re.MULTILINE)
    assert re.findall(r"`(\w+)`", row) == list(SCHEMAS[verb]["properties"])


def test_lengths_and_rows_fit(chats: Path, tmp_path: Path) -> None:
    tiny = ("--processor", "tiny", "--num", 5)
    analysis = run("analyze", chats, *tiny, "--capacity", 500, "--world-size", 2)
    check("analyze", analysis)
    assert analysis["shared_prefixes"]["packed"] and analysis["refused"]["listed"] and analysis["packed"][0]["oversize"]
    check("analyze", run("analyze", "synthetic", "--processor", "tiny", "--num", 2, "--min-shared", 0))

    left_out = ("--on-bad", "skip", "--max-bad-fraction", 1, "--oversize", "drop", "--min-shared", 16)
    packed = run("pack", chats, tmp_path / "rows", *tiny, "--capacity", 500, *left_out)
    check("pack", packed)
    assert set(packed["reasons"]) == {"row_unreadable", "oversize"} and Path(packed["left_out"]).is_file()

    shown = run("show", tmp_path / "rows", "--row", 0, "--row", -1)
    check("show", shown)
    assert [row["tree"] for row in shown["rows"]] != [None, None]


def test_an_object_with_another_field_or_without_one_does_not_fit(chats: Path) -> None:
    printed = run("analyze", chats, "--processor", "tiny")
    for changed in ({**printed, "more": 1}, {name: part for name, part in printed.items() if name != "images"}):
        with pytest.raises(ValidationError):
            check("analyze", changed)


@pytest.mark.full
def test_the_environment_and_a_probe_fit() -> None:
    check("doctor", run("doctor"))
    report = run("doctor", "tiny", "--probe")
    check("doctor-probe", report)
    assert report["healthy"] is True and report["probes"][0]["plain"]


@pytest.mark.full
def test_the_demo_fits(tmp_path: Path) -> None:
    printed = run("demo", "--steps", 1, "--batch-size", 2, "--out", tmp_path)
    check("demo", printed)
    assert printed == json.loads((tmp_path / "demo.json").read_text())


def test_a_refusal_prints_no_json(chats: Path) -> None:
    done = CliRunner().invoke(app, ["analyze", str(chats), "--processor", "nowhere", "--json"])
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith("vlmpack: --processor nowhere")


def test_a_verb_without_json_has_no_schema() -> None:
    done = CliRunner().invoke(app, ["schema", "completion"])
    assert done.exit_code == 2
    assert "choose analyze, demo, doctor, doctor-probe, pack, serve or show" in done.stderr
