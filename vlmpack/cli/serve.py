"""`vlmpack serve`: the model-step service."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, final

import typer

from vlmpack.cli import options
from vlmpack.cli.inputs import quiet_transformers
from vlmpack.cli.progress import waiting
from vlmpack.errors import ConfigError, check_extra

if TYPE_CHECKING:
    from vlmpack.service.ranks import Launched
    from vlmpack.service.server import Base, Service, ServiceSettings

DEMO_NAME = "vlmpack/tiny-qwen3-vl"
DEMO_PIXELS = 256 * 32 * 32
"""Largest image of the demo: 256 tokens."""
SAMPLERS = ("exact", "fast", "vllm")
DEMO_FOLDER = "demo-model"
KEY_VARIABLE = "VLMPACK_API_KEY"
Shard = Annotated[bool, typer.Option("--shard", help="Shard the base model over the workers (FSDP2); adapters only.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Log warnings and errors, no requests.")]
GradientCheckpointing = Annotated[
    bool, typer.Option("--gradient-checkpointing", help="Less memory: layers are computed again for gradients.")
]
LoraOnly = Annotated[bool, typer.Option("--lora-only", help="Refuse training of all weights.")]
NO_KEY = ""
"""Of settings whose key is not read yet."""


def serve(
    model: Annotated[
        str | None, typer.Argument(help="Hub id or folder of a Qwen-VL or Qwen model.", show_default=False)
    ] = None,
    demo: Annotated[bool, typer.Option("--demo", help="Serve a tiny random Qwen3-VL, made in seconds.")] = False,
    host: Annotated[str, typer.Option(help="Address; 0.0.0.0: all, for a proxy that speaks TLS.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0: any that is free.")] = 8000,
    state: Annotated[
        Path | None,
        typer.Option(help="Folder of journal and weights; by default one a model in ~/.local/share/vlmpack."),
    ] = None,
    key_file: Annotated[
        Path | None,
        typer.Option(
            help=f"File with the key, made if it is not there; by default STATE/key. {KEY_VARIABLE} goes first."
        ),
    ] = None,
    name: Annotated[str | None, typer.Option(help="What clients call the model; by default its own name.")] = None,
    device: options.Device = None,
    dtype: Annotated[
        str | None,
        options.word(*options.DTYPES, help="float32 or bfloat16; by default float32 on cpu, bfloat16 on cuda."),
    ] = None,
    lora_only: LoraOnly = False,
    gradient_checkpointing: GradientCheckpointing = False,
    share_prefixes: Annotated[
        bool, typer.Option(help="Compute once what datums of a request begin with alike (prefix tree).")
    ] = True,
    max_length: Annotated[
        int | None, typer.Option(min=2, help="Most tokens of a datum or prompt; by default the model's context.")
    ] = None,
    row_tokens: Annotated[int, typer.Option(min=2, help="Token budget of a packed row.")] = 8192,
    max_patches: options.MaxPatches = None,
    max_models: Annotated[int, typer.Option(min=1, help="Most models of all clients at one time.")] = 64,
    sampler: Annotated[
        str,
        options.word(*SAMPLERS, help="exact; fast: rounding may change tokens of a seed; vllm: fast on a GPU."),
    ] = "exact",
    workers: Annotated[int, typer.Option(min=1, help="Data-parallel processes on this machine.")] = 1,
    shard: Shard = False,
    as_json: options.Json = False,
    quiet: Quiet = False,
) -> None:
    """Serve packed training steps and sampling to the tinker client, on one base model.

    Clients train LoRA adapters or all weights, sample and save; see vlmpack/service/README.md.
    """
    check_extra("serve", "starlette", "uvicorn", "google.protobuf", "zstandard", needed_by="`vlmpack serve`")
    if demo == (model is not None):
        raise ConfigError("vlmpack serve needs a MODEL, or --demo without one")
    if model is not None:
        options.refuse_file("MODEL", model)
    # Read when torch is first imported: threads that spin at a barrier slow down other work on the machine.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from vlmpack.layout.sharing import MIN_SHARED
    from vlmpack.service.limits import ServiceLimits
    from vlmpack.service.ranks import Launched
    from vlmpack.service.server import ServiceSettings

    launched = Launched(workers, sys.argv[1:]) if workers > 1 and "LOCAL_RANK" not in os.environ else None
    served = name or (DEMO_NAME if model is None else Path(model).resolve().name if Path(model).is_dir() else model)
    folder = (state or default_state(served)).expanduser()
    options.make_folder("--state", folder, mode=0o700)
    settings = ServiceSettings(
        state=folder,
        key=NO_KEY,
        limits=ServiceLimits(context=max_length, row_tokens=row_tokens, row_patches=max_patches, models=max_models),
        lora_only=lora_only,
        gradient_checkpointing=gradient_checkpointing,
        min_shared=MIN_SHARED if share_prefixes else None,
        sampler=sampler,
        shard_on=options.torch_device(device).type if shard else None,
    )
    chosen = str(options.torch_device(device))
    source = ModelSource(
        model=model, folder=folder / DEMO_FOLDER, name=served, device=chosen, dtype=dtype, is_sharded=shard
    )
    key_file = (key_file or folder / "key").expanduser()
    place = Place(key_file=key_file, host=host, port=port, as_json=as_json, quiet=quiet)
    _serve(source, settings, place, launched)


@final
@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """Where the base model comes from."""

    model: str | None
    """Hub id or folder; None: the demo's."""
    folder: Path
    """Of the demo's model."""
    name: str
    """The name that clients use."""
    device: str
    """Of torch."""
    dtype: str | None
    """Of the weights; None: float32 on a CPU, bfloat16 elsewhere."""
    is_sharded: bool
    """True if the model is read on the CPU, to be sharded from there."""

    def load(self) -> Base:
        """Load model and processor."""
        from vlmpack.service.server import load_base

        dtype = self.dtype or ("float32" if self.device == "cpu" else "bfloat16")
        with quiet_transformers():
            device = "cpu" if self.is_sharded else self.device
            return load_base(self.model or str(self.folder), name=self.name, device=device, dtype=dtype)


@final
@dataclass(frozen=True, kw_only=True)
class Place:
    """Where clients find the service."""

    key_file: Path
    """File with the key."""
    host: str
    """Address."""
    port: int
    """Port; 0: any that is free."""
    as_json: bool
    """Announce the service as a JSON object."""
    quiet: bool
    """Log no requests."""


def _serve(source: ModelSource, settings: ServiceSettings, place: Place, launched: Launched | None) -> None:
    """Serve on this process, or follow rank 0 where it is another one."""
    from vlmpack.service.ranks import end, join
    from vlmpack.service.server import Service, bind, check_key, check_state, follow_rank_0, read_key

    ranks = join(launched)
    _log_to_stderr(logging.WARNING if place.quiet else logging.INFO)
    if ranks is not None and ranks.rank > 0:
        try:
            ranks.receive()  # when rank 0 has made the demo's model
            follow_rank_0(source.load(), settings, ranks)
        except ConnectionError as error:
            logging.getLogger("vlmpack.service").error("%s, and so rank %d ends", error, ranks.rank)
            end(1)
        end(0)
    check_state(settings.state, source.name)
    key = os.environ.get(KEY_VARIABLE)
    settings = replace(settings, key=check_key(key, KEY_VARIABLE) if key else read_key(place.key_file))
    with bind(place.host, place.port) as listening:
        if source.model is None:
            with quiet_transformers():
                make_demo(source.folder)
        if ranks is not None:
            ranks.send(None)
        with waiting("reading the model", quiet=place.quiet):
            service = Service(source.load(), settings, ranks=ranks)
        address = f"http://{_shown(place.host)}:{listening.getsockname()[1]}"
        facts = described(service, address, None if key else place.key_file)
        text = json.dumps(facts, indent=2) if place.as_json else announcement(facts)
        service.run(listening, on_start=lambda: _print(text))
    if launched is not None:
        launched.wait()
    end(0)  # taking an interpreter apart that has torch loaded takes seconds


def default_state(name: str) -> Path:
    """Return the state folder of a model: one each, as a journal belongs to its base model."""
    home = os.environ.get("XDG_DATA_HOME") or "~/.local/share"
    return Path(home) / "vlmpack" / name.strip("/").replace("/", "--")


def make_demo(folder: Path) -> None:
    """Write the tiny Qwen3-VL of the demo with its processor, unless it is there; the same weights each time."""
    if (folder / "complete").exists():
        return
    from vlmpack.testing.models import tiny_model
    from vlmpack.testing.processors import tiny_processor

    processor = tiny_processor(max_pixels=DEMO_PIXELS)
    model = tiny_model(processor=processor)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    (folder / "complete").touch()


def described(service: Service, address: str, key_file: Path | None) -> dict[str, Any]:
    """Return where a service is and what it serves, for JSON.

    Args:
        service: the service.
        address: of the service.
        key_file: where the key is; None: in the environment.
    """
    base, limits = service.engine.base, service.settings.limits
    return {
        "address": address,
        "key_file": str(key_file.resolve()) if key_file else None,
        "model": base.name,
        "architecture": base.arch,
        "takes_images": base.is_vision,
        "state": str(service.settings.state.resolve()),
        "limits": {
            "datum_tokens": base.max_context,
            "row_tokens": limits.row_tokens,
            "row_patches": limits.patches,
            "models": limits.models,
            "rank": limits.rank,
            "body_bytes": limits.body_bytes,
        },
    }


def announcement(facts: Mapping[str, Any]) -> str:
    """Format `described` for people, with the lines that a client begins with. The key is not in it: logs keep it."""
    address, key_file, limits = facts["address"], facts["key_file"], facts["limits"]
    source = f'open("{key_file}").read().strip()' if key_file else f'os.environ["{KEY_VARIABLE}"]'
    imports = "import tinker" if key_file else "import os, tinker"
    lines = [
        f"address   {address}",
        f"key file  {key_file}" if key_file else f"key       {KEY_VARIABLE}",
        f"model     {facts['model']} ({facts['architecture']}, text{' and images' if facts['takes_images'] else ''})",
        f"state     {facts['state']}",
        f"limits    {limits['datum_tokens']:,} tokens a datum, rows of {limits['row_tokens']:,} tokens and "
        f"{limits['row_patches']:,} patches, {limits['models']} models of rank {limits['rank']} at most, bodies of "
        f"{limits['body_bytes'] >> 20} MiB",
        "",
        imports,
        f'client = tinker.ServiceClient(base_url="{address}", api_key={source})',
        f'training = client.create_lora_training_client(base_model="{facts["model"]}").result()',
        "",
    ]
    return "\n".join(lines)


def _shown(host: str) -> str:
    """Return the host of an address that a client on this machine can use."""
    return {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)


def _print(text: str) -> None:
    typer.echo(text)
    sys.stdout.flush()


def _log_to_stderr(level: int) -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", datefmt="%H:%M:%S"))
    for logger in (logging.getLogger("vlmpack.service"), logging.getLogger("uvicorn.error")):
        logger.addHandler(handler)
        logger.setLevel(level if logger.name.startswith("vlmpack") else logging.WARNING)
