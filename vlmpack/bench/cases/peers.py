"""peers: what other projects do with the same tokenised samples, against us; equal results first, then times."""

from __future__ import annotations

from collections.abc import Iterator

from vlmpack.bench.figure import Figure, Skipped
from vlmpack.bench.peers import PEERS, Contest, Peer, PeerShapes, PeerWork, check_equal
from vlmpack.bench.settings import BenchSettings
from vlmpack.bench.timing import alternate, one_thread
from vlmpack.errors import ConfigError, VlmpackError

CASE = "peers"
THEIRS = "theirs"


def measure_peers(settings: BenchSettings, shapes: PeerShapes) -> list[Figure | Skipped]:
    """Time every peer that is installed, with one thread, as in a DataLoader's worker."""
    work = PeerWork.of(shapes, seed=settings.seed)
    found: list[Figure | Skipped] = []
    contests: list[tuple[str, Contest]] = []
    for peer in PEERS:
        try:
            module = peer.load()
        except ConfigError as error:
            found.append(Skipped(case=CASE, name=peer.name, why=str(error)))
            continue
        contests += [(_title(peer, contest), contest) for contest in peer.contests(module, work)]
    for title, contest in contests:
        found += _measure(title, contest, settings, seconds=settings.seconds / len(contests))
    return found


def _title(peer: Peer, contest: Contest) -> str:
    return f"{peer.name} {peer.version}" + f" ({contest.work})" * bool(contest.work)


def _measure(title: str, contest: Contest, settings: BenchSettings, *, seconds: float) -> Iterator[Figure | Skipped]:
    try:
        check_equal(contest)
    except VlmpackError as error:
        yield Skipped(case=CASE, name=title, why=str(error), owed=True)
        return
    ways = {THEIRS: contest.theirs.call, **{name: way.call for name, way in contest.ours.items()}}
    with one_thread():
        timings = alternate(ways, seconds=seconds)
    yield Figure.timed(CASE, title, timings, THEIRS, settings)
    for name in contest.ours:
        of = (THEIRS, name)
        yield Figure.compared(CASE, f"{title} / {name}", timings, of, settings, target=contest.target)
