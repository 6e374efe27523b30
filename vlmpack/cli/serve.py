"""`vlmpack serve`: the model-step service."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

import typer
from rich.console import Console

from vlmpack.cli import options
from vlmpack.errors import ConfigError, check_extra
from vlmpack.terminal import print_facts, progress_lines, quiet_transformers

if TYPE_CHECKING:
    from vlmpack.service.ranks import Ranks
    from vlmpack.service.server import Base, Service, ServiceSettings

DEMO_NAME = "vlmpack/tiny-qwen3-vl"
DEMO_PIXELS = 256 * 32 * 32
"""Maximum pixels of an image in the demo: 256 tokens."""
KEY_VARIABLE = "VLMPACK_API_KEY"


def serve(
    model: Annotated[
        str | None, typer.Argument(help="Hub id or folder of a supported model.", show_default=False)
    ] = None,
    demo: Annotated[bool, typer.Option("--demo", help="Serve a tiny random Qwen3-VL, ready in seconds.")] = False,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0: all, behind a TLS proxy.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0: any free one.")] = 8000,
    state: Annotated[
        Path | None,
        typer.Option(help="Folder for journal and weights; by default one per model in ~/.local/share/vlmpack."),
    ] = None,
    key_file: Annotated[
        Path | None,
        typer.Option(help=f"File with the API key, created if missing; by default STATE/key. {KEY_VARIABLE} wins."),
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name of the model for clients; by default its own.")] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(help="Hub id that remote clients load the tokenizer from, if MODEL is a folder.", metavar="ID"),
    ] = None,
    device: options.Device = None,
    dtype: Annotated[options.Dtype | None, typer.Option(help="By default float32 on cpu, bfloat16 on cuda.")] = None,
    lora_only: Annotated[bool, typer.Option("--lora-only", help="Refuse to train all weights.")] = False,
    gradient_checkpointing: Annotated[
        bool, typer.Option("--gradient-checkpointing", help="Recompute layers for gradients, to save memory.")
    ] = False,
    share_prefixes: Annotated[bool, typer.Option(help="Compute shared prefixes of a request only once.")] = True,
    max_length: Annotated[
        int | None, typer.Option(min=2, metavar="N", help="Maximum tokens of a datum or prompt; default: the context.")
    ] = None,
    row_tokens: Annotated[int, typer.Option(min=2, help="Maximum tokens of a packed row.")] = 8192,
    max_patches: Annotated[int | None, typer.Option(min=1, metavar="N", help="Maximum patches of a row.")] = None,
    max_models: Annotated[int, typer.Option(min=1, help="Maximum models of all clients.")] = 64,
    silent_after: Annotated[
        float, typer.Option(min=15, metavar="S", help="Seconds without a heartbeat until a session may be evicted.")
    ] = 60.0,
    sampler: Annotated[
        Literal["exact", "fast", "vllm"],
        typer.Option(help="fast: rounding may change the tokens of a seed; vllm: fast on a GPU."),
    ] = "exact",
    batch_invariant: Annotated[
        bool, typer.Option("--batch-invariant", help="Sampled log-probabilities equal training's to the bit; on a CPU.")
    ] = False,
    workers: Annotated[int, typer.Option(min=1, help="Data-parallel processes on this machine.")] = 1,
    shard: Annotated[
        bool, typer.Option("--shard", help="Shard the base model over the workers (FSDP2); adapters only.")
    ] = False,
    as_json: options.Json = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Log only warnings and errors.")] = False,
) -> None:
    """Serve packed training steps and sampling of one base model to the tinker client.

    Clients train LoRA adapters or all weights, sample and save; see vlmpack/service/README.md.
    """
    check_extra("serve", "starlette", "uvicorn", "google.protobuf", needed_by="`vlmpack serve`")
    if demo == (model is not None):
        raise ConfigError("vlmpack serve needs a MODEL, or --demo without one")
    # Read when torch is first imported; threads that spin at a barrier slow down other work on the machine.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from vlmpack.layout.sharing import MIN_SHARED
    from vlmpack.service.limits import ServiceLimits
    from vlmpack.service.queue.checkpoints import StateFolder
    from vlmpack.service.ranks import Launched, end, join
    from vlmpack.service.server import (
        Service,
        ServiceSettings,
        bind,
        check_key,
        load_base,
        make_key,
        model_name,
        read_key,
    )

    served = name or (DEMO_NAME if model is None else model_name(model))
    folder = (state or default_state(served)).expanduser()
    chosen = options.torch_device(device)
    settings = ServiceSettings(
        key="",  # read below, by rank 0
        limits=ServiceLimits(
            context=max_length,
            row_tokens=row_tokens,
            row_patches=max_patches,
            models=max_models,
            silent_seconds=silent_after,
        ),
        lora_only=lora_only,
        gradient_checkpointing=gradient_checkpointing,
        min_shared=MIN_SHARED if share_prefixes else None,
        sampler=sampler,
        batch_invariant=batch_invariant,
        shard_on=chosen.type if shard else None,
    )
    base = partial(
        load_base, model or str(folder / "demo-model"), name=served, tokenizer=tokenizer,
        device="cpu" if shard else str(chosen), dtype=dtype or ("float32" if str(chosen) == "cpu" else "bfloat16"),
    )  # fmt: skip
    _log_to_stderr(logging.WARNING if quiet else logging.INFO)
    if os.environ.get("RANK", "0") != "0" and (ranks := join()) is not None:
        _follow(base, settings, ranks)
    given, key_file = os.environ.get(KEY_VARIABLE), (key_file or folder / "key").expanduser()
    key = check_key(given, KEY_VARIABLE) if given else read_key(key_file)
    # all refusals come before anything is written, before other ranks start, and before a model is loaded
    with bind(host, port) as listening, closing(StateFolder(folder, base_model=served)) as opened:
        settings = replace(settings, key=key or make_key(key_file))
        starts_others = workers > 1 and "LOCAL_RANK" not in os.environ  # otherwise torchrun has started them
        launched = Launched(workers, sys.argv[1:]) if starts_others else None
        ranks = join(launched)
        with quiet_transformers():
            if model is None:
                make_demo(folder / "demo-model")
                opened.make_private()
            if ranks is not None:
                ranks.send(None)
            with progress_lines("loading the model", quiet=quiet):
                service = Service(base(), opened, settings, ranks=ranks)
        address = f"http://{_shown(host)}:{listening.getsockname()[1]}"
        facts = described(service, address, None if given else key_file)
        text = partial(typer.echo, json.dumps(facts, indent=2))
        service.run(listening, on_start=text if as_json else partial(announce, facts))
    if launched is not None:
        launched.wait()
    end(0)  # the normal end of an interpreter with torch takes seconds


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
