"""A small JSON document that processes share: the one that made it, and all that are forked or spawned from it.

    main process ──fork, spawn──▶ worker 0, worker 1, ...        every one reads and writes the same document
         └─────────pickle, deepcopy──▶ a document of its own     with the same content

The document lies in an anonymous file, so that nothing remains of it. A lock of the operating system serialises the
processes; it is let go when its process ends, however that happens, so a killed worker blocks none.
"""

from __future__ import annotations

import json
import os
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.context import get_spawning_popen
from threading import RLock
from typing import Any, final

try:
    import fcntl
except ImportError:  # not on Windows: there every process has a document of its own
    fcntl = None


@final
class SharedDocument:
    """A dictionary of what JSON holds.

    Args:
        content: what it holds at first.
    """

    def __init__(self, content: dict[str, Any]) -> None:
        self._content = content
        self._adopt(_anonymous_file())
        self._store()

    def __getstate__(self) -> dict[str, Any]:
        """To a process that is being spawned goes the file itself; into any other pickle its content."""
        if self._file is not None and get_spawning_popen() is not None:
            from multiprocessing.reduction import DupFd

            return {"file": DupFd(self._file)}
        with self.changed() as content:
            return {"content": json.loads(json.dumps(content))}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "file" in state:
            self._content = {}
            self._adopt(state["file"].detach())
        else:
            self.__init__(state["content"])

    @contextmanager
    def changed(self) -> Iterator[dict[str, Any]]:
        """The content as all processes left it, which may be changed until the block ends; blocks may be nested."""
        if self._process != os.getpid():  # forked, perhaps while another thread of the parent held its lock
            self._lock, self._depth, self._process = RLock(), 0, os.getpid()
        with self._lock:
            if self._depth == 0:
                self._load()
            self._depth += 1
            try:
                yield self._content
            finally:
                self._depth -= 1
                if self._depth == 0:
                    self._store()

    def _adopt(self, file: int | None) -> None:
        self._file, self._lock, self._depth, self._process = file, RLock(), 0, os.getpid()
        if file is not None:
            weakref.finalize(self, _close, file)

    def _load(self) -> None:
        """Take the lock and read; the file is shared by descriptor, so its position is not used."""
        if self._file is not None and fcntl is not None:
            fcntl.lockf(self._file, fcntl.LOCK_EX)  # not `flock`, which a fork shares
            self._content = json.loads(os.pread(self._file, os.fstat(self._file).st_size, 0))

    def _store(self) -> None:
        """Write, and let the lock go."""
        if self._file is not None and fcntl is not None:
            text = json.dumps(self._content).encode()
            os.pwrite(self._file, text, 0)
            os.ftruncate(self._file, len(text))
            fcntl.lockf(self._file, fcntl.LOCK_UN)


def _anonymous_file() -> int | None:
    """The descriptor of a new file without a name; None: there can be none, and nothing is shared."""
    if fcntl is None:
        return None
    with suppress(OSError, AttributeError):  # of Linux
        return os.memfd_create("vlmpack")
    with suppress(OSError), tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
    return None


def _close(file: int) -> None:
    with suppress(OSError):
        os.close(file)
