"""`vlmpack serve`: the model-step service."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

import typer
from rich.console import Console
from typer import Argument, Option

from vlmpack.cli import options
from vlmpack.errors import ConfigError, check_extra
from vlmpack.terminal import print_facts, progress_lines, quiet_transformers

if TYPE_CHECKING:
    from vlmpack.service.ranks import Ranks
    from vlmpack.service.server import Base, Service, ServiceSettings

DEMO_NAME = "vlmpack/tiny-qwen3-vl"
DEMO_PIXELS = 256 * 32 * 32
"""Maximum pixels of an image in the demo: 256 tokens."""


@dataclass(frozen=True, kw_only=True)
class ServeOptions(options.OutputOptions):
    """What is served, and how."""

    model: Annotated[str | None, Argument(show_default=False)] = None
    """Hub id or folder of a supported model."""
    demo: bool = False
    """Serve a tiny random Qwen3-VL, ready in seconds."""
    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0: all, behind a TLS proxy."""
    port: Annotated[int, Option(min=0, max=65535)] = 8000
    """Port; 0: any free one."""
    state: Path | None = None
    """Folder for journal and weights; by default one per model in ~/.local/share/vlmpack."""
    key_file: Path | None = None
    """File with the API key, created if missing; by default STATE/key. VLMPACK_API_KEY wins."""
    name: str | None = None
    """Name of the model for clients; by default its own."""
    tokenizer: Annotated[str | None, Option(metavar="ID")] = None
    """Hub id that remote clients load the tokenizer from, if MODEL is a folder."""
    device: options.Device | None = None
    """Device; by default cuda if there is one."""
    dtype: options.Dtype | None = None
    """By default float32 on cpu, bfloat16 on cuda."""
    lora_only: bool = False
    """Refuse to train all weights."""
    gradient_checkpointing: bool = False
    """Recompute layers for gradients, to save memory."""
    share_prefixes: bool = True
    """Compute shared prefixes of a request only once."""
    max_length: Annotated[int | None, Option(min=2, metavar="N")] = None
    """Maximum tokens of a datum or prompt; default: the context."""
    row_tokens: Annotated[int, Option(min=2)] = 8192
    """Maximum tokens of a packed row."""
    max_patches: options.Limit = None
    """Maximum patches of a row."""
    max_models: options.AtLeast1 = 64
    """Maximum models of all clients."""
    silent_after: Annotated[float, Option(min=15, metavar="S")] = 60.0
    """Seconds without a heartbeat until a session may be evicted."""
    sampler: Literal["exact", "fast", "vllm"] = "exact"
    """fast: rounding may change the tokens of a seed; vllm: fast on a GPU."""
    batch_invariant: bool = False
    """Sampled log-probabilities equal training's to the bit; on a CPU."""
    workers: options.AtLeast1 = 1
    """Data-parallel processes on this machine."""
    shard: bool = False
    """Shard the base model over the workers (FSDP2); adapters only."""
    quiet: Annotated[bool, Option("--quiet", "-q")] = False
    """Log only warnings and errors."""


@options.with_options
def serve(given: ServeOptions) -> None:
    """Serve packed training steps and sampling of one base model to the tinker client.

    Clients train LoRA adapters or all weights, sample and save; see vlmpack/service/README.md.
    """
    check_extra("serve", "starlette", "uvicorn", "google.protobuf", needed_by="`vlmpack serve`")
    if given.demo == (given.model is not None):
        raise ConfigError("vlmpack serve needs a MODEL, or --demo without one")
    # Read when torch is first imported; threads that spin at a barrier slow down other work on the machine.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from vlmpack.service.queue.checkpoints import StateFolder
    from vlmpack.service.ranks import Launched, end, join
    from vlmpack.service.server import KEY_VARIABLE, Service, bind, find_key, load_base, make_key, model_name

    served = given.name or (DEMO_NAME if given.model is None else model_name(given.model))
    folder = (given.state or default_state(served)).expanduser()
    chosen = options.torch_device(given.device).type
    settings = service_settings(given, chosen)
    base = partial(
        load_base,
        given.model or str(folder / "demo-model"),
        name=served,
        tokenizer=given.tokenizer,
        device=chosen,
        dtype=given.dtype,
        shard=given.shard,
    )
    _log_to_stderr(logging.WARNING if given.quiet else logging.INFO)
    if os.environ.get("RANK", "0") != "0" and (ranks := join()) is not None:
        _follow(base, settings, ranks)
    key_file = (given.key_file or folder / "key").expanduser()
    key = find_key(key_file)
    # all refusals come before anything is written, before other ranks start, and before a model is loaded
    with bind(given.host, given.port) as listening, closing(StateFolder(folder, base_model=served)) as opened:
        settings = replace(settings, key=key or make_key(key_file))
        starts_others = given.workers > 1 and "LOCAL_RANK" not in os.environ  # otherwise torchrun has started them
        launched = Launched(given.workers, sys.argv[1:]) if starts_others else None
        ranks = join(launched)
        with quiet_transformers():
            if given.demo:
                make_demo(folder / "demo-model")
                opened.make_private()
            if ranks is not None:
                ranks.send(None)
            with progress_lines("loading the model", quiet=given.quiet):
                service = Service(base(), opened, settings, ranks=ranks)
        address = f"http://{_shown(given.host)}:{listening.getsockname()[1]}"
        facts = described(service, address, None if os.environ.get(KEY_VARIABLE) else key_file)
        text = partial(typer.echo, json.dumps(facts, indent=2))
        service.run(listening, on_start=text if given.as_json else partial(announce, facts))
    if launched is not None:
        launched.wait()
    end(0)  # the normal end of an interpreter with torch takes seconds


def service_settings(given: ServeOptions, device: str) -> ServiceSettings:
    """Return the settings of the service, without its key."""
    from vlmpack.layout.sharing import MIN_SHARED
    from vlmpack.service.limits import ServiceLimits
    from vlmpack.service.server import ServiceSettings

    limits = ServiceLimits(
        context=given.max_length,
        row_tokens=given.row_tokens,
        row_patches=given.max_patches,
        models=given.max_models,
        silent_seconds=given.silent_after,
    )
    return ServiceSettings(
        key="",
        limits=limits,
        lora_only=given.lora_only,
        gradient_checkpointing=given.gradient_checkpointing,
        min_shared=MIN_SHARED if given.share_prefixes else None,
        sampler=given.sampler,
        batch_invariant=given.batch_invariant,
        shard_on=device if given.shard else None,
    )


def _follow(base: Callable[[], Base], settings: ServiceSettings, ranks: Ranks) -> NoReturn:
    """Compute what rank 0 sends, until it stops."""
    from vlmpack.service.ranks import end
    from vlmpack.service.server import follow_rank_0

    try:
        ranks.receive()  # rank 0 has written the demo's model
        with quiet_transformers():
            loaded = base()
        follow_rank_0(loaded, settings, ranks)
    except ConnectionError as error:
        logging.getLogger("vlmpack.service").error("%s, so rank %d ends", error, ranks.rank)
        end(1)
    end(0)


def default_state(name: str) -> Path:
    """Return the state folder of a model. Each model has its own, because a journal belongs to its base model."""
    home = os.environ.get("XDG_DATA_HOME") or "~/.local/share"
    return Path(home) / "vlmpack" / name.strip("/").replace("/", "--")


def make_demo(folder: Path) -> None:
    """Write the tiny Qwen3-VL of the demo and its processor unless they exist; always with the same weights."""
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
    """Describe a service, for JSON.

    Args:
        service: the service.
        address: its URL.
        key_file: file with the key; None: the key is in the environment.
    """
    base, limits = service.engine.base, service.settings.limits
    return {
        "address": address,
        "key_file": str(key_file.resolve()) if key_file else None,
        "model": base.name,
        "architecture": base.arch,
        "takes_images": base.is_vision,
        "tokenizer": base.tokenizer_id,
        "state": str(service.state.path.resolve()),
        "limits": {
            "datum_tokens": base.max_context,
            "row_tokens": limits.row_tokens,
            "row_patches": limits.patches,
            "models": limits.models,
            "rank": limits.rank,
            "body_bytes": limits.body_bytes,
        },
    }


def announce(facts: Mapping[str, Any]) -> None:
    """Print `described` for people, with the first lines of a client; without the key, because logs keep it."""
    from vlmpack.service.server import KEY_VARIABLE

    address, key_file, model, limits = (facts[name] for name in ("address", "key_file", "model", "limits"))
    told = {name: value for name, value in facts.items() if name != "limits"}
    print_facts(Console(), {**told, "key_file": key_file or f"none: {KEY_VARIABLE} is set", **limits})
    source = f'open("{key_file}").read().strip()' if key_file else f'os.environ["{KEY_VARIABLE}"]'
    typer.echo(f"""
import {"tinker" if key_file else "os, tinker"}
client = tinker.ServiceClient(base_url="{address}", api_key={source})
training = client.create_lora_training_client(base_model="{model}").result()
""")


def _shown(host: str) -> str:
    """Return the host as a client on this machine writes it in a URL."""
    return {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)


def _log_to_stderr(level: int) -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", datefmt="%H:%M:%S"))
    for logger in (logging.getLogger("vlmpack.service"), logging.getLogger("uvicorn.error")):
        logger.addHandler(handler)
        logger.setLevel(level if logger.name.startswith("vlmpack") else logging.WARNING)
