"""The demo's table: padded, packed, and what lies between them."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table

from vlmpack.cli.contest import Run
from vlmpack.cli.gradients import Agreement
from vlmpack.terminal import print_table


def print_comparison(padded: Run, packed: Run, agreement: Agreement, console: Console, *, device: str) -> None:
    """The table, and what its numbers are."""
    print_table(console, comparison(padded, packed, agreement, device=device))
    console.print(notes(padded, packed, agreement, device=device), highlight=False)


def comparison(padded: Run, packed: Run, agreement: Agreement, *, device: str) -> Table:
    """One row a measure."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    table.add_column("padded", justify="right")
    table.add_column("packed", justify="right")
    table.add_column("packed / padded", justify="right")
    for name, before, after in _sizes(padded, packed):
        table.add_row(name, f"{before:,}", f"{after:,}", _ratio(after, before))
    table.add_row("fill", f"{padded.fill:.1%}", f"{packed.fill:.1%}", "")
    table.add_row("step time", _seconds(padded), _seconds(packed), _ratio(packed.step_seconds, padded.step_seconds))
    speeds = padded.tokens_per_second, packed.tokens_per_second
    table.add_row("real tokens/s", *(f"{speed:,.0f}" for speed in speeds), _ratio(speeds[1], speeds[0]))
    memory = "peak memory" if device == "cuda" else "peak memory*"
    table.add_row(memory, _mib(padded), _mib(packed), _ratio(packed.peak_bytes, padded.peak_bytes), end_section=True)
    final, largest = loss_differences(padded, packed)
    table.add_row("final loss", f"{padded.losses[-1]:.6f}", f"{packed.losses[-1]:.6f}", f"off by {final:.1e}")
    table.add_row("largest loss difference", "", "", f"{largest:.1e}")
    table.add_row("smallest gradient cosine", "", "", f"[bold green]{agreement.cosine:.13f}[/]")
    return table


def loss_differences(padded: Run, packed: Run) -> tuple[float, float]:
    """(of the last step, the largest of all steps), in nats per target."""
    differences = [abs(a - b) for a, b in zip(padded.losses, packed.losses, strict=True)]
    return differences[-1], max(differences)


def _sizes(padded: Run, packed: Run) -> list[tuple[str, int, int]]:
    return [
        ("real tokens", padded.real_tokens, packed.real_tokens),
        ("physical tokens", padded.physical_tokens, packed.physical_tokens),
    ]


def notes(padded: Run, packed: Run, agreement: Agreement, *, device: str) -> str:
    """What the table's numbers are, and what they come to."""
    lengths = [length for step in packed.lengths for length in step]
    said = [
        f"[dim]{len(packed.losses)} steps of {len(packed.lengths[0])} samples, {min(lengths)} to {max(lengths)} tokens "
        "each; step times are medians.",
        f"cosine: one packed batch against each of its samples alone, in float32, the worst of "
        f"{agreement.parameters} parameters, vision tower included ({agreement.parameter}).",
    ]
    if device != "cuda":
        said.append("* tensors alive at one time in the forward and backward pass of one batch.")
    speed, memory = _ratio(padded.step_seconds, packed.step_seconds), _ratio(packed.peak_bytes, padded.peak_bytes)
    said.append(f"[/]\nThe same training, [bold]{speed} times as fast[/] with [bold]{memory} times the memory[/].")
    return "\n".join(said)


def _ratio(after: float, before: float) -> str:
    return f"{after / before:.2f}"


def _seconds(run: Run) -> str:
    return f"{run.step_seconds * 1000:,.0f} ms"


def _mib(run: Run) -> str:
    return f"{run.peak_bytes / 2**20:,.0f} MiB"
