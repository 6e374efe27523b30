"""Execute a notebook with this interpreter as its kernel: `python notebook_runner.py in.ipynb out.ipynb`.

It is a process of its own, because Jupyter's event loops and sockets raise warnings, which tests turn into errors.
"""

from __future__ import annotations

import sys
from pathlib import Path

import nbformat
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient

CELL_TIMEOUT_S = 300


class ThisInterpreter(AsyncKernelManager):
    """Starts `sys.executable`, whatever kernels the machine knows."""

    @property
    def kernel_spec(self) -> KernelSpec:
        command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        return KernelSpec(argv=command, display_name="this interpreter", language="python")


def main(source: str, target: str) -> None:
    """Run every cell; the first error ends the process with its traceback."""
    notebook = nbformat.read(source, as_version=4)
    where = {"metadata": {"path": str(Path(target).parent)}}
    client = NotebookClient(
        notebook, timeout=CELL_TIMEOUT_S, kernel_manager_class=ThisInterpreter, resources=where, record_timing=False
    )
    client.execute()
    nbformat.write(notebook, target)


main(*sys.argv[1:])
