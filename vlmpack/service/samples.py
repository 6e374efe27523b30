"""The samples that wait and those that are in the sampling engine; its snapshots, opened when they are first needed."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, cast, final

from vlmpack.errors import RequestError
from vlmpack.service.checkpoints import StateFolder
from vlmpack.service.ledger import Entry, Ledger
from vlmpack.service.messages import Failure, Outcome, Sample
from vlmpack.service.operations import describe_failure
from vlmpack.service.protocols import SamplingEngine

BASE = "base"
"""Key of the base model in the sampling engine; names of folders are longer."""

log = logging.getLogger("vlmpack.service")


@final
class SampleLane:
    """Hands samples to the sampling engine and takes its results, one slice of work at a time.

    Args:
        sampler: the sampling engine.
        ledger: all that was accepted.
        state: where the snapshots lie.
        parse: parses a request out of the journal.
        finish: commits outcomes.
    """

    def __init__(
        self,
        *,
        sampler: SamplingEngine,
        ledger: Ledger,
        state: StateFolder,
        parse: Callable[[Entry], Sample],
        finish: Callable[[list[tuple[Entry, Outcome]]], None],
    ) -> None:
        self._sampler = sampler
        self._ledger = ledger
        self._state = state
        self._parse = parse
        self._finish = finish
        self._open: OrderedDict[str, int] = OrderedDict()
        """Keys of the sampling engine, least recently used first, with their running samples."""
        self._running: dict[str, tuple[str, Entry]] = {}
        """Key and request by the name in the engine."""
        self._count = 0

    @property
    def has_work(self) -> bool:
        """Return whether a slice would do anything."""
        return bool(self._running) or any(_is_encoded(entry) for entry in self._ledger.new_samples)

    @property
    def folders_in_use(self) -> set[str]:
        """Folders that running samples were opened from."""
        return {key for key, _ in self._running.values()}

    def run_slice(self) -> None:
        """Enter the samples that are encoded, and do one slice of work."""
        with self._ledger.lock:
            ready = [(entry, entry.encoded) for entry in self._ledger.new_samples if _is_encoded(entry)]
            left = {id(entry) for entry, _ in ready}
            self._ledger.new_samples = [entry for entry in self._ledger.new_samples if id(entry) not in left]
        for entry, prompt in ready:
            if not entry.is_done:
                self._enter(entry, cast("Future[Any]", prompt))
        if self._running:
            self._step()

    def _enter(self, entry: Entry, encoded: Future[Any]) -> None:
        try:
            prompt = encoded.result()
            request = self._parse(entry)
            key = self._opened(entry)
            self._count += 1
            name = f"{entry.row.owner}:{entry.row.seq}#{self._count}"
            self._sampler.add(name, key, prompt, request)
        except RequestError as error:
            self._finish([(entry, Failure(message=str(error), category="user"))])
        except Exception as error:
            log.exception("a sample could not be begun")
            self._finish([(entry, Failure(message=describe_failure(error), category="server"))])
        else:
            self._open[key] += 1
            self._running[name] = (key, entry)

    def _opened(self, entry: Entry) -> str:
        with self._ledger.lock:
            sampler = self._ledger.samplers.get(entry.row.owner)
        if sampler is None:
            raise RequestError(f"the sampling session {entry.row.owner} has ended")
        folder = sampler.row.folder
        key = folder or BASE
        if key not in self._open:
            self._close_idle(self._ledger.settings.samplers_open - 1)
            self._sampler.open(key, None if folder is None else self._state.folder(folder))
            self._open[key] = 0
        self._open.move_to_end(key)
        return key

    def _close_idle(self, kept: int) -> None:
        for key in [key for key, running in self._open.items() if running == 0][: max(len(self._open) - kept, 0)]:
            del self._open[key]
            self._sampler.close(key)

    def close_unwanted(self, wanted: set[str]) -> None:
        """Close the snapshots that nothing refers to any more."""
        for key in [key for key, running in self._open.items() if running == 0 and key not in wanted and key != BASE]:
            del self._open[key]
            self._sampler.close(key)

    def _step(self) -> None:
        try:
            finished = self._sampler.step()
        except Exception as error:
            log.exception("the sampling engine failed")
            self._fail_all(describe_failure(error))
            return
        outcomes: list[tuple[Entry, Outcome]] = []
        for name, outcome in finished:
            if name in self._running:  # else of a snapshot that was closed when the engine failed
                key, entry = self._running.pop(name)
                self._open[key] -= 1
                outcomes.append((entry, outcome))
        if outcomes:
            self._finish(outcomes)

    def _fail_all(self, message: str) -> None:
        running, self._running = self._running, {}
        keys, self._open = self._open, OrderedDict()
        for key in keys:
            try:
                self._sampler.close(key)
            except Exception:
                log.exception("a snapshot could not be closed")
        self._finish([(entry, Failure(message=message, category="server")) for _, entry in running.values()])


def _is_encoded(entry: Entry) -> bool:
    return entry.encoded is not None and entry.encoded.done()
