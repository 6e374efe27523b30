"""The examples of the READMEs and of docs/, run in the order in which a reader meets them, and their claims."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from cases import slow
from chats import chat, picture
from test_example import write_chats
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from vlmpack import VLMCollator
from vlmpack.testing import tiny_model, tiny_processor

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
CONTRIBUTING = ROOT / "CONTRIBUTING.md"
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
DOCUMENTS = (README, CONTRIBUTING, ROOT / "SECURITY.md", *PAGES)
FENCE = re.compile(r"^```python(?P<mark>[^\n]*)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)


class Example(NamedTuple):
    """One ```python block of a page."""

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


def as_a_reader(page: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in a folder with the conversations that a page opens; the hub ids of a page load tiny models."""
    processor = tiny_processor()
    monkeypatch.chdir(folder)
    if 'open_dataset("chats.jsonl")' in (text := page.read_text(encoding="utf-8")):
        write_chats(folder, broken=False, scale=3 if "share_prefixes=" in text else 1)  # prefixes of 64 tokens
    monkeypatch.setattr("transformers.training_args.is_torch_bf16_gpu_available", lambda: True)
    monkeypatch.setattr("vlmpack.data.load_processor", lambda name: processor)
    for auto in (AutoModelForImageTextToText, AutoModelForCausalLM):

        def load_model(name: str, *, load: Any = auto.from_pretrained, **settings: object) -> object:
            tiny = {"Qwen/Qwen3-VL-2B-Instruct": "qwen3_vl", "Qwen/Qwen3-0.6B": "qwen3"}.get(name)
            return load(name, **settings) if tiny is None else tiny_model(tiny, processor=processor)

        monkeypatch.setattr(auto, "from_pretrained", load_model)


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # PyTorch imports its compiler
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # PEFT reads it
@pytest.mark.filterwarnings("ignore:'pin_memory' argument:UserWarning")  # readers have a GPU
@pytest.mark.parametrize("page", [README, *slow(*filter(examples, PAGES))], ids=lambda page: page.stem)
def test_the_examples_of_a_page_run_in_order(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    as_a_reader(page, tmp_path, monkeypatch)
    assert run(page) == sum(not example.mark for example in examples(page))


PACKAGES = sorted(path.parent.name for path in (ROOT / "vlmpack").glob("*/README.md") if examples(path))


def given(package: str) -> dict[str, Any]:
    """What the examples in a package's README take as given."""
    if package not in ("collate", "families", "probing", "model"):
        return {}
    processor, feature = tiny_processor(), chat("q", "a", picture())
    if package == "collate":
        return {"processor": processor, "tokenizer": processor.tokenizer, "feature": feature}
    row = VLMCollator(processor, layout="packed").collate([feature])
    return {"processor": processor, "model": tiny_model(processor=processor), "row": row}


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # PyTorch imports its compiler
@pytest.mark.parametrize("package", [*(package for package in PACKAGES if package != "probing"), *slow("probing")])
def test_the_examples_of_a_package_run(package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(ROOT / "vlmpack" / package / "README.md", **given(package)) > 0


def test_the_navigation_of_the_site_lists_every_page() -> None:
    listed = set(re.findall(r"(\w+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE))
    made = {"index.md", "security.md", "changelog.md", "contributing.md"}
    assert listed == {page.name for page in PAGES} | made


def test_a_wrong_example_would_be_noticed(tmp_path: Path) -> None:
    wrong = tmp_path / "README.md"
    wrong.write_text("Text\n\n```python\nx = 1\n```\n\n```python\nassert x == 2\n```\n")
    with pytest.raises(AssertionError) as caught:
        run(wrong)
    assert caught.traceback[-1].lineno == 7  # counted from 0: the traceback points into the README


def test_an_example_that_is_not_run_says_why_and_is_valid_python() -> None:
    marked = [(page, example) for page in (README, *PAGES) for example in examples(page) if example.mark]
    assert marked
    for page, example in marked:
        assert re.fullmatch(r"no-run: \w.{10,}", example.mark), f"{page} line {example.line}: {example.mark!r}"
        ast.parse(example.code)


def test_every_make_command_in_the_readme_exists_and_every_file_that_the_makefile_names() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    named = set(re.findall(r"\bmake ([a-z-]+)", README.read_text(encoding="utf-8")))
    assert {"demo", "test"} <= named <= set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    files = set(re.findall(r"\btests/[\w/.]+", makefile))
    assert {"tests/families", "tests/test_traps.py"} <= files
    assert [file for file in files if not (ROOT / file).exists()] == []


def test_every_reason_in_the_table_of_bad_samples_is_one_that_the_collator_gives() -> None:
    page = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    table = page.partition("| Reason |")[2].partition("\n\n")[0]
    reasons = set(re.findall(r"`([a-z_]+)`", "".join(row.split("|")[1] for row in table.splitlines()[2:])))
    files = [path for package in ("collate", "data") for path in (ROOT / "vlmpack" / package).glob("*.py")]
    source = "\n".join(path.read_text(encoding="utf-8") for path in files)
    of_kinds = " ".join(re.sub(r"{(self\.)?kind}", kind, source) for kind in ("image", "video", "audio"))
    given = set(re.findall(r'"([a-z_]+)"', of_kinds.replace('f"', '"')))
    assert len(reasons) > 10
    assert reasons <= given


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_link_into_the_project_leads_somewhere(document: Path) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)[^)]*\)", document.read_text(encoding="utf-8"))
    assert [link for link in links if not (document.parent / link).exists()] == []
