"""The table of docs/service.md: what becomes of each call, loss and option of the installed client.

`python tests/service/web/surface.py` writes it. The client's public classes and request types are walked; whether the
service has an endpoint, a loss or a field is asked of its own routes, losses and dataclasses.
"""

from __future__ import annotations

import sys
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import tinker
from tinker.types import loss_fn_type

from vlmpack.service.engine.losses import LOSSES, REFUSED
from vlmpack.service.web.http import NOT_SERVED, Endpoints
from vlmpack.service.wire import codec, messages

PAGE = Path(__file__).parents[3] / "docs" / "service.md"
BEGIN, END = "<!-- client: made by tests/service/web/surface.py -->\n", "<!-- end of client -->\n"
CLIENTS = ("ServiceClient", "TrainingClient", "SamplingClient", "RestClient", "AdminClient")
RUN, SAVED = "training_runs/{model_id}", "training_runs/{model_id}/checkpoints/{kind}/{name}"
IN_CLIENT = "in the client"
NAMES = {"name": "path", "lora": "lora_config", "adam": "adam_params", "params": "sampling_params"}
CALLS = {
    **dict.fromkeys(("holder", "get_console_url", "get_telemetry", "on_queue_state_change", "create_rest_client"), ""),
    **dict.fromkeys(("get_tokenizer", "get_sampler_handle", "from_sampler_handle"), ""),
    "get_server_capabilities": "get_server_capabilities",
    "create_lora_training_client": "create_model",
    "create_training_client_from_state": "load_weights",
    "create_training_client_from_state_with_optimizer": "load_weights",
    "copy_weights": "copy_weights",
    "create_custom_loss": "create_custom_loss",
    "create_sampling_client": "create_sampling_session",
    "create": "create_sampling_session",
    "close": "sessions/{session_id}/finish",
    "forward": "forward_backward",
    "forward_backward": "forward_backward",
    "forward_backward_custom": "forward_backward",
    "optim_step": "optim_step",
    "save_state": "save_weights",
    "load_state": "load_weights",
    "load_state_with_optimizer": "load_weights",
    "save_weights_for_sampler": "save_weights_for_sampler",
    "save_weights_and_get_sampling_client": "save_weights_for_sampler",
    "save_weights_external": "save_weights_external",
    "get_info": "get_info",
    "sample": "asample",
    "compute_logprobs": "asample",
    "get_base_model": "samplers/{sampler_id}",
    "get_sampler": "samplers/{sampler_id}",
    "get_training_run": RUN,
    "get_training_run_by_tinker_path": RUN,
    "get_weights_info_by_tinker_path": "weights_info",
    "list_training_runs": "training_runs",
    "list_checkpoints": f"{RUN}/checkpoints",
    "list_user_checkpoints": "checkpoints",
    "get_external_weights_urls": f"{SAVED}/external_weights_urls",
    "delete_checkpoint": SAVED,
    "delete_checkpoint_from_tinker_path": SAVED,
    "set_checkpoint_ttl_from_tinker_path": f"{SAVED}/ttl",
    "publish_checkpoint_from_tinker_path": f"{SAVED}/publish",
    "unpublish_checkpoint_from_tinker_path": f"{SAVED}/publish",
    "get_session": "sessions/{session_id}",
    "list_sessions": "sessions",
    "search_sessions": "sessions/search",
    "assign_session_project": "sessions/{session_id}/project",
    "export_session_trace": "sessions/{session_id}/trace_export",
    "get_audit_log": "audit",
    "get_billing_usage": "billing/usage/events",
    "get_current_checkpoint_storage_usage": "billing/usage/checkpoints/current",
    "whoami": "auth/token",
}
"""The endpoint of each public method, with or without `_async`; empty: it asks nothing of the service."""
REQUESTS: dict[str, tuple[type, ...]] = {
    "CreateSessionRequest": (messages.NewSession,),
    "CreateModelRequest": (messages.CreateModel,),
    "LoadWeightsRequest": (messages.LoadWeights, messages.CreateFromCheckpoint),
    "OptimStepRequest": (messages.OptimStep,),
    "SaveWeightsRequest": (messages.SaveWeights,),
    "SaveWeightsForSamplerRequest": (messages.SaveForSampler,),
    "SaveWeightsExternalRequest": (messages.SaveExternal,),
    "CreateSamplingSessionRequest": (messages.NewSampler,),
    "SampleRequest": (messages.Sample,),
    "LoraConfig": (messages.LoraConfig,),
    "AdamParams": (messages.AdamParams,),
    "SamplingParams": (messages.SamplingParams,),
}
"""What each type of the client is read as."""
ELSEWHERE = {
    "type": "the endpoint says it",
    "optim_params": "adam_params on the wire",
    "SampleRequest.base_model": "the client names a sampling session",
    "SampleRequest.model_path": "the client names a sampling session",
}
"""Fields that say nothing of their own."""


def methods() -> list[str]:
    """Public methods of all classes, each once; one with `_async` is the same."""
    names = [name for client in CLIENTS for name in vars(getattr(tinker, client)) if not name.startswith("_")]
    return [*dict.fromkeys(name.removesuffix("_async") for name in names)]


def verdict(path: str) -> str:
    """Whether a path is served; if it is not, the remedy that its refusal names."""
    if not path:
        return IN_CLIENT
    nothing: Any = SimpleNamespace(limits=None)
    endpoints = Endpoints(nothing, nothing, key="")
    if f"/api/v1/{path}" in {route.path for route in endpoints.routes()}:
        return "served"
    (remedy,) = (NOT_SERVED[part] for part in path.split("/") if part in NOT_SERVED)
    return f"refused: {remedy}"


def losses() -> dict[str, str]:
    """Verdict of each loss; KeyError: of one the service says nothing."""
    names = get_args(loss_fn_type.LossFnType)
    return {name: "served" if name in LOSSES else f"refused: {REFUSED[name]}" for name in names}


def options() -> dict[str, str]:
    """Verdict of each field of the client's requests that is not served; KeyError: of one it says nothing."""
    found = {}
    for name, kinds in REQUESTS.items():
        kind = getattr(tinker.types, name)
        known = {NAMES.get(column.name, column.name) for each in kinds for column in fields(each)}
        for option in getattr(kind, "model_fields", None) or kind.__dataclass_fields__:
            if option not in known and option not in ELSEWHERE and f"{name}.{option}" not in ELSEWHERE:
                found[f"{name}.{option}"] = f"refused: {codec.REFUSED[option]}"
    return found


def table() -> str:
    """What becomes of each: in a word, or a line for what is refused."""
    found = {name: verdict(CALLS[name]) for name in methods()} | losses() | options()
    lines = [f"Of `tinker` {tinker.__version__}. Every option that is not listed is served.\n\n| | |\n|---|---|\n"]
    for word in ("served", IN_CLIENT):
        lines.append(f"| {word} | {', '.join(f'`{name}`' for name, text in found.items() if text == word)} |\n")
    refused = {name: text for name, text in found.items() if text not in ("served", IN_CLIENT)}
    return "".join([*lines, *(f"| `{name}` | {text} |\n" for name, text in refused.items())])


def written(text: str) -> str:
    """The page with the table in its place."""
    before, rest = text.split(BEGIN)
    return before + BEGIN + table() + END + rest.split(END)[1]


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    sys.exit()
