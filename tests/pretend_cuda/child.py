"""Run tests marked `gpu` on the pretend device: those of a file together, in a process of their own.

The device is there for a whole process or not at all, so the process that runs the other tests has none. The reports of
the child become those of the tests here: each passes, fails with its own traceback, or is skipped by itself.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """Report a test that its child has run."""
    if not item.get_closest_marker("gpu") or item.get_closest_marker("skip"):
        return None
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for report in _reports_of(item):
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    item.session._setupstate.teardown_exact(nextitem)  # of the file, if this was its last test
    return True


ALL_REPORTS = pytest.StashKey[dict[Path, dict[str, list[pytest.TestReport]]]]()


def _reports_of(item: pytest.Item) -> list[pytest.TestReport]:
    """Of set-up, call and tear-down; the first test of a file runs them all."""
    of_files = item.config.stash.setdefault(ALL_REPORTS, {})
    if item.path not in of_files:
        of_files[item.path] = _run([other for other in item.session.items if other.path == item.path])
    return of_files[item.path][item.nodeid]


def _run(items: list[pytest.Item]) -> dict[str, list[pytest.TestReport]]:
    """Run those of these tests that are marked, in a child."""
    marked = [item for item in items if item.get_closest_marker("gpu") and not item.get_closest_marker("skip")]
    config, found = marked[0].config, {item.nodeid: [] for item in marked}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "reports.jsonl")
        command = [sys.executable, str(HERE), "-m", "pretend_cuda.child", str(path), *found]
        done = subprocess.run(command, cwd=config.rootpath, capture_output=True, text=True, check=False)
        lines = path.read_text().splitlines() if path.exists() else []
    for line in lines:
        report = config.hook.pytest_report_from_serializable(config=config, data=json.loads(line))
        if report.skipped:
            report.longrepr = tuple(report.longrepr)  # file, line and reason: a list in JSON
        found[report.nodeid].append(report)
    for item in marked:
        if not any(report.when == "teardown" for report in found[item.nodeid]):
            found[item.nodeid].append(_lost(item, f"{done.stdout}\n{done.stderr}\nit ended with {done.returncode}"))
    return found


def _lost(item: pytest.Item, output: str) -> pytest.TestReport:
    """Of a test that its child has not run to the end."""
    text = f"the process with the pretend CUDA device ended without this test:\n{output[-5000:]}"
    return pytest.TestReport(
        nodeid=item.nodeid, location=item.location, keywords={}, outcome="failed", longrepr=text, when="call"
    )


class Reporter:
    """Writes the reports of a child's tests, one JSON object a line."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._config: pytest.Config | None = None

    def pytest_configure(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        assert self._config is not None
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        with self._path.open("a") as file:
            file.write(json.dumps(data) + "\n")


if __name__ == "__main__":
    path, *tests = sys.argv[1:]
    options = ("-q", "-p", "no:cacheprovider", "-p", "no:xdist")
    sys.exit(pytest.main([*options, *tests], plugins=[Reporter(Path(path))]))
