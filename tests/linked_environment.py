"""Create an environment with a wheel and its base requirements and nothing else, in seconds: links instead of copies.

    python tests/linked_environment.py .venv-wheel dist/vlmpack-0.1.0-py3-none-any.whl

Those packages of the running interpreter are linked that the wheel requires, directly or in turn. A version that does
not meet a requirement is an error. `make wheel-fresh` installs everything instead, which takes minutes.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Iterable
from email.parser import HeaderParser
from importlib.metadata import Distribution, distribution
from pathlib import Path

from packaging.requirements import Requirement


def requirements_of(wheel: Path) -> list[str]:
    """What a wheel requires, with and without extras."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return HeaderParser().parsestr(archive.read(name).decode()).get_all("Requires-Dist", [])


def required_by(requirements: Iterable[str]) -> dict[str, Distribution]:
    """The distributions that are required without extras, in turn, by their names."""
    found: dict[str, Distribution] = {}
    todo, done = [(Requirement(line), "") for line in requirements], set()
    while todo:
        requirement, extra = todo.pop()
        is_asked_for = requirement.marker is None or requirement.marker.evaluate({"extra": extra})
        key = (requirement.name, *sorted(requirement.extras))
        if not is_asked_for or key in done:
            continue
        done.add(key)
        package = found[requirement.name] = distribution(requirement.name)
        assert requirement.specifier.contains(package.version, prereleases=True), (requirement, package.version)
        todo += [(Requirement(line), each) for line in package.requires or [] for each in ("", *requirement.extras)]
    return found


def link(package: Distribution, site: Path) -> None:
    """Link the files and folders of a distribution's site-packages into another environment."""
    names = {Path(file).parts[0] for file in package.files or [] if Path(file).parts[0] not in ("..", "__pycache__")}
    assert names, f"{package.metadata['Name']} lists no files"
    for name in sorted(names):
        if not (site / name).exists():
            (site / name).symlink_to(Path(str(package.locate_file(name))))


def make(folder: Path, packages: Iterable[Distribution]) -> Path:
    """Make an environment of these packages anew, and return its interpreter."""
    venv.EnvBuilder(clear=True, symlinks=True, with_pip=False).create(folder)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(folder.resolve())}))
    for package in packages:
        link(package, site)
    return folder / "bin" / "python"


def main(folder: Path, wheel: Path) -> None:
    """Make the environment of a wheel."""
    packages = required_by(requirements_of(wheel))
    python = make(folder, packages.values())
    install = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "--python", str(python)]
    subprocess.run([*install, "install", "--no-deps", "--no-index", str(wheel)], check=True)
    subprocess.run([*install, "check"], check=True)
    print(f"{folder}: {wheel.name} and {len(packages)} packages that it requires")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
