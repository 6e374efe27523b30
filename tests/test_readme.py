"""The examples of the README and of docs/, run in the order in which a reader meets them, and their claims."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import NamedTuple

import pytest
from test_example import write_chats
from transformers import AutoModelForImageTextToText

from vlmpack.testing import tiny_model, tiny_processor

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
CONTRIBUTING = ROOT / "CONTRIBUTING.md"
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
DOCUMENTS = (README, CONTRIBUTING, ROOT / "SECURITY.md", *PAGES)
FENCE = re.compile(r"^```python(?P<mark>[^\n]*)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)


class Example(NamedTuple):
    """One ```python block of the README."""

    line: int
    mark: str
    code: str


def examples(path: Path = README) -> list[Example]:
    """All python blocks, in order; those in HTML comments prepare what the example after them takes as given."""
    text = path.read_text(encoding="utf-8")
    return [
        Example(text.count("\n", 0, match.start("code")), match["mark"].strip(), match["code"])
        for match in FENCE.finditer(text)
    ]


def run(*paths: Path, **prepared: object) -> int:
    """Run the examples of files in one namespace, which begins with `prepared`; return their number."""
    runnable = [(path, example) for path in paths for example in examples(path) if not example.mark]
    names: dict[str, object] = {"__name__": "readme", **prepared}
    for path, example in runnable:
        exec(compile("\n" * example.line + example.code, path, "exec"), names)
    return len(runnable)


def test_the_examples_run_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(README) >= 3


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # PyTorch imports its compiler
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # PEFT reads it
@pytest.mark.filterwarnings("ignore:'pin_memory' argument:UserWarning")  # readers have a GPU
@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if examples(page)], ids=lambda page: page.stem)
def test_the_examples_of_a_page_run_by_themselves(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tiny model stands in for the one that a page downloads, and conversations made here for the reader's."""
    processor, load = tiny_processor(), AutoModelForImageTextToText.from_pretrained

    def load_model(name: str, **settings: object) -> object:
        return tiny_model(processor=processor) if name.startswith("Qwen/") else load(name, **settings)

    monkeypatch.chdir(tmp_path)
    if page.stem == "quickstart":
        write_chats(tmp_path, broken=False)
    monkeypatch.setattr("vlmpack.data.load_processor", lambda name: processor)
    monkeypatch.setattr(AutoModelForImageTextToText, "from_pretrained", load_model)
    runnable = [example for example in examples(page) if not example.mark]
    assert run(page) == len(runnable)


def test_the_navigation_of_the_site_lists_every_page() -> None:
    listed = set(re.findall(r"(\w+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE))
    made = {"overview.md", "security.md", "changelog.md", "contributing.md"}
    assert listed == {page.name for page in PAGES} | made


def test_a_wrong_example_would_be_noticed(tmp_path: Path) -> None:
    wrong = tmp_path / "README.md"
    wrong.write_text("Text\n\n```python\nx = 1\n```\n\n```python\nassert x == 2\n```\n")
    with pytest.raises(AssertionError) as caught:
        run(wrong)
    assert caught.traceback[-1].lineno == 7  # counted from 0: the traceback points into the README


def test_an_example_that_is_not_run_says_why_and_is_valid_python() -> None:
    marked = [example for example in examples() if example.mark]
    assert marked
    for example in marked:
        assert re.fullmatch(r"no-run: \w.{10,}", example.mark), f"README line {example.line}: {example.mark!r}"
        ast.parse(example.code)


def test_every_make_command_in_the_readme_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    named = set(re.findall(r"\bmake ([a-z-]+)", README.read_text(encoding="utf-8")))
    assert {"demo", "test"} <= named
    assert named <= targets


def test_every_reason_in_the_table_of_bad_samples_is_one_that_the_collator_gives() -> None:
    page = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    table = page.partition("| Reason |")[2].partition("\n\n")[0]
    reasons = set(re.findall(r"`([a-z_]+)`", "".join(row.split("|")[1] for row in table.splitlines()[2:])))
    files = [path for package in ("collate", "data") for path in (ROOT / "vlmpack" / package).glob("*.py")]
    source = "\n".join(path.read_text(encoding="utf-8") for path in files)
    given = set(re.findall(r'"([a-z_]+)"', re.sub(r"{(self\.)?kind}", "image", source).replace('f"', '"')))
    assert len(reasons) > 10
    assert reasons <= given


def test_every_message_in_the_table_of_setup_is_one_of_the_package() -> None:
    page = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    said = re.findall(r"^\| `([^`]+)` \|", page.partition("## Setup")[2], re.MULTILINE)
    pieces = [piece for message in said for piece in re.split(r"…|^\w+Error: ", message) if len(piece) > 12]
    source = "".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "vlmpack").rglob("*.py")))
    joined = re.sub(r'"\s*f?"', "", source)
    assert len(pieces) > 12
    assert [piece for piece in pieces if piece.strip() not in joined and "CUDA" not in piece] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_link_into_the_project_leads_somewhere(document: Path) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)[^)]*\)", document.read_text(encoding="utf-8"))
    assert [link for link in links if not (document.parent / link).exists()] == []
