"""Pages of the site that are made from the project itself, and links that lead from one of its files to another.

mkdocs calls the functions `on_...`. In the repository pages link files (`../vlmpack/plan/README.md`); on the site those
that are pages become links to them, and those that are not (tests, notebooks, sources) are named without a link.
"""

from __future__ import annotations

import ast
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
LINK = re.compile(
    r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?!https?:|#|mailto:)([^)#\s]+)(#[^)\s]*)?\)"
)
FENCE = re.compile(r"^(```python)[^\n]*$", re.MULTILINE)

PACKAGES = sorted(path.parent.name for path in (ROOT / "vlmpack").glob("*/__init__.py"))
MODULES = {"interop": ("megatron", "seqpacker")}
"""Modules that users import from, of packages that export nothing themselves."""
FILES = ("lengths", "rows")
"""Modules that users import from and that are no packages."""
EXAMPLES = sorted(path.name for path in (ROOT / "examples").glob("*.py"))


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Fill the parts of the navigation that list packages and examples."""
    listed = {
        "reference": [
            {"vlmpack": "reference/vlmpack.md"},
            *({name: f"reference/{name}.md"} for name in _documented()),
        ],
        "inside": [{name: f"inside/{name}.md"} for name in (*PACKAGES, "benchmarks")],
        "examples": [{name: f"examples/{Path(name).stem}.md"} for name in EXAMPLES],
    }
    config.nav = [
        {title: listed[entry] if isinstance(entry, str) and entry in listed else entry}
        for part in config.nav or []
        for title, entry in part.items()
    ]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made."""
    for uri, text in _made_pages().items():
        files.append(File.generated(config, uri, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite links between files of the repository, and marks of examples that tests read."""
    uri = page.file.src_uri
    source = _SOURCES.get(uri, f"docs/{uri}")
    return FENCE.sub(r"\1", LINK.sub(lambda match: _on_site(match, source, uri), markdown))


# ---------------------------------------------------------------------- pages and the files that they are made from

_SOURCES = {
    **{f"inside/{name}.md": f"vlmpack/{name}/README.md" for name in PACKAGES},
    **{f"examples/{Path(name).stem}.md": f"examples/{name}" for name in EXAMPLES},
    "inside/benchmarks.md": "benchmarks/README.md",
    "changelog.md": "CHANGELOG.md",
    "contributing.md": "CONTRIBUTING.md",
    "security.md": "SECURITY.md",
    "index.md": "README.md",
}
_PAGES = {source: uri for uri, source in _SOURCES.items()}


def _made_pages() -> dict[str, str]:
    made = {
        uri: (ROOT / source).read_text(encoding="utf-8") for uri, source in _SOURCES.items()
    }
    for name in EXAMPLES:
        uri = f"examples/{Path(name).stem}.md"
        made[uri] = f"# {name}\n\n```python\n{made[uri]}```\n"
    made["reference/vlmpack.md"] = _reference("vlmpack")
    made |= {
        f"reference/{name}.md": _reference(f"vlmpack.{name}") for name in _documented()
    }
    return made


def _documented() -> list[str]:
    """Packages and modules that users import from."""
    return sorted(
        [
            *FILES,
            *(name for name in PACKAGES if name in MODULES or _exported(f"vlmpack.{name}")),
        ]
    )


def _reference(module: str) -> str:
    """Every public name of a package: what has a docstring in full, plain constants by their values."""
    folder, name = ROOT.joinpath(*module.split(".")), module.rpartition(".")[2]
    if name in MODULES:
        return (
            "\n\n".join(
                f"# {module}.{part}\n\n::: {module}.{part}" for part in MODULES[name]
            )
            + "\n"
        )
    constants = {
        name: value
        for path in folder.glob("*.py")
        for name, value in _bare_constants(path).items()
    }
    names = _exported(module)
    blocks = [
        f"::: {module}.{name}\n    options: {{show_root_heading: true}}"
        for name in names
        if name not in constants
    ]
    lines = [f"- `{name} = {constants[name]}`" for name in names if name in constants]
    return (
        "\n\n".join(
            [f"# {module}", *blocks, *(["## Constants", "\n".join(lines)] if lines else [])]
        )
        + "\n"
    )


def _exported(module: str) -> list[str]:
    folder = ROOT.joinpath(*module.split("."))
    path = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
    lists = [value for names, value in _assignments(path) if names == ["__all__"]]
    return ast.literal_eval(lists[0]) if lists else []


def _bare_constants(path: Path) -> dict[str, str]:
    """Constants that are unpacked from a tuple, as `TEXT, IMAGE = 0, 1`."""
    pairs = [
        (names, value)
        for names, value in _assignments(path)
        if isinstance(value, ast.Tuple) and len(names) > 1
    ]
    return {
        name: ast.unparse(value)
        for names, tuple_ in pairs
        for name, value in zip(names, tuple_.elts, strict=True)
    }


def _assignments(path: Path) -> Iterator[tuple[list[str], ast.expr]]:
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign):
            targets = [
                name
                for target in node.targets
                for name in (target.elts if isinstance(target, ast.Tuple) else [target])
            ]
            yield [name.id for name in targets if isinstance(name, ast.Name)], node.value


def _names(node: ast.Assign) -> list[str]:
    return [target.id for target in node.targets if isinstance(target, ast.Name)]


def _on_site(match: re.Match[str], source: str, uri: str) -> str:
    picture, text, target, anchor = match.groups()
    path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
    page = _PAGES.get(
        path, path.removeprefix("docs/") if re.match(r"docs/.*\.(md|png)$", path) else None
    )
    if page is None and (ROOT / path).is_dir() and f"{path}/README.md" in _PAGES:
        page = _PAGES[f"{path}/README.md"]
    if page is not None:
        return f"{picture}[{text}]({posixpath.relpath(page, posixpath.dirname(uri))}{anchor or ''})"
    if not (ROOT / path).exists():
        return match[0]  # mkdocs names it
    return f"{text} (`{path}`)"
