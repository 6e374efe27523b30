"""Masks, positions and logits of the model's own code, for comparison with its family's descriptor. No weight is read.

    masks        a twin of the text part runs on a few embeddings, with layers that only record
    logits       a twin of the model runs, with a backbone and a head that return fixed numbers

Twins share everything else with the model, which is not changed, not even while they run.

transformers builds a mask from a function of (batch, head, query, key). Registered under a name of ours, a mask
function hands that function itself on to each layer: so it is measured how far back a token sees, and no mask is built.
A descriptor that differs from the model is an error when packing is enabled, or at the first row.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, final

import torch
from torch import nn
from transformers import AttentionMaskInterface

from vlmpack.errors import FamilyError
from vlmpack.model.mechanisms import ModelParts

MaskFunction = Callable[[int, int, torch.Tensor, torch.Tensor], torch.Tensor]
"""(batch, head, query, key) to whether the query attends to the key."""

TOKENS = 5
"""Length of the sample that is tried."""
FAR = 1 << 20
"""A query that is further from the first token than any window is long: what reaches further is none."""


# ---------------------------------------------------------------------- masks of layers

_NAME = "vlmpack_masks"


def _mask_function(*_: Any, mask_function: MaskFunction, **__: Any) -> MaskFunction:
    return mask_function


AttentionMaskInterface.register(_NAME, _mask_function)


def measured_windows(text: nn.Module) -> dict[int, int | None]:
    """Measure the window of each decoder layer with attention, by its number, as the model's own code masks it.

    Returns:
        Tokens that a query attends to, itself included; None: all before it.

    Raises:
        FamilyError: a layer's mask is something else than causal within a window.
    """
    masks = {layer: mask for layer, (mask, _) in _recorded(text).items() if callable(mask)}
    windows = {mask: _window(mask, layer) for layer, mask in masks.items()}
    return {layer: windows[mask] for layer, mask in masks.items()}


def _window(mask: Any, layer: int) -> int | None:
    """Measure how many tokens a far query attends to."""
    keys = torch.arange(FAR + 2, device="cpu")
    query = torch.tensor(FAR, device="cpu")
    seen = mask(torch.tensor(0), torch.tensor(0), query, keys).expand(len(keys))
    window = int(seen.sum())
    if not torch.equal(seen, (keys <= query) & (query - keys < window)):
        raise FamilyError(
            f"layer {layer} attends to other tokens than those before them, or a window of those, in the model's own "
            "code, which packed rows cannot do; train this model without packing"
        )
    return window if window <= FAR else None


def check_positions(model: ModelParts) -> None:
    """Compare the positions that a text model computes by itself with those of its family.

    Raises:
        FamilyError: they differ.
    """
    expected = list(range(TOKENS))
    for layer, (_, positions) in _recorded(model.text).items():
        if positions is not None and positions.flatten().tolist() != expected:
            raise FamilyError(
                f"layer {layer} of this {type(model.core).__name__} gets positions {positions.flatten().tolist()} for "
                f"{TOKENS} tokens, but {model.family.model_type} is described with {expected}; its descriptor is wrong"
            )


@final
class _AllCalledError(Exception):
    """All layers were called: the rest need not run."""


@final
class _Recorder(nn.Module):
    """Stands in place of a decoder layer, with its attributes, and records its mask and positions."""

    def __init__(self, layer: nn.Module, record: Callable[[Any, Any], None]) -> None:
        super().__init__()
        object.__setattr__(self, "layer", layer)
        object.__setattr__(self, "record", record)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.layer, name)

    def forward(self, hidden: torch.Tensor, *_: Any, **kwargs: Any) -> torch.Tensor:
        self.record(kwargs.get("attention_mask"), kwargs.get("position_ids"))
        return hidden


@torch.no_grad()
def _recorded(text: Any) -> dict[int, tuple[Any, Any]]:
    """(mask, positions) of each layer, for a sample of a few embeddings."""
    found: dict[int, tuple[Any, Any]] = {}
    layers: Any = text.layers
    count = min(len(layers), text.config.num_hidden_layers)

    def recorder(number: int, layer: nn.Module) -> nn.Module:
        def record(mask: Any, positions: Any) -> None:
            found[number] = mask, positions
            if len(found) == count:
                raise _AllCalledError

        return _Recorder(layer, record)

    parameter = next(text.parameters())
    embeddings = torch.zeros(1, TOKENS, text.config.hidden_size, dtype=parameter.dtype, device=parameter.device)
    recorders = nn.ModuleList([recorder(number, layer) for number, layer in enumerate(layers)])
    config = copy.copy(text.config)
    config._attn_implementation_internal = _NAME
    twin = _twin(text, {"layers": recorders}, config=config)
    try:
        type(text).forward(twin, inputs_embeds=embeddings, use_cache=False)
    except _AllCalledError:
        return found
    raise FamilyError(f"a {type(text).__name__} called {len(found)} of its {count} layers; is its forward its own?")


def _twin(module: nn.Module, parts: Mapping[str, nn.Module], **attributes: Any) -> Any:
    """The same module with other parts and attributes: running it leaves the model as it is, and so do its hooks."""
    twin = object.__new__(type(module))
    vars(twin).update(vars(module), _modules={**module._modules, **parts}, **attributes)
    return twin


# ---------------------------------------------------------------------- the head


@final
class _Output:
    """What a backbone returns: hidden states, and None under every other name."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, index: int) -> torch.Tensor:
        assert index == 0
        return self.last_hidden_state

    def __getattr__(self, name: str) -> None:
        return None


@final
class _Fixed(nn.Module):
    """Stands in place of a backbone or a head, and returns the same thing whatever it is given."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value
        self.given: Any = None

    def forward(self, *args: Any, **_: Any) -> Any:
        self.given = args[0] if args else None
        return self.value


@torch.no_grad()
def check_logits(model: ModelParts) -> None:
    """Compare what the model's own forward does to the head's output, and to its input, with its family's descriptor.

    Raises:
        FamilyError: log-probabilities of packed rows would be others.
    """
    core, family = model.core, model.family
    hidden = torch.linspace(-3, 3, 6, device="cpu").reshape(1, 2, 3)
    values = torch.tensor([-900.0, -30.0, -2.0, 0.0, 0.5, 7.0, 31.0, 450.0], device="cpu").reshape(1, 2, 4)
    backbone, head = _Fixed(_Output(hidden)), _Fixed(values)
    stock: Any = next(klass for klass in reversed(type(core).__mro__) if klass.__name__ == family.model_class)
    twin = _twin(core, {family.backbone_path: backbone, family.head_path: head})
    ids = torch.zeros(1, 2, dtype=torch.int64, device="cpu")
    logits = stock.forward(twin, input_ids=ids, use_cache=False, return_dict=True).logits
    expected = family.logits(values, family.text_config(core.config))
    if head.given is not hidden and not torch.equal(head.given, hidden):
        raise FamilyError(
            f"a {stock.__name__} changes hidden states before its head, which {family.model_type} is not described with"
        )
    if not torch.allclose(logits, expected, rtol=1e-5):
        at = int((logits - expected).abs().argmax())
        raise FamilyError(
            f"a {stock.__name__} makes a logit of {logits.flatten()[at]:.6g} of its head's {values.flatten()[at]:.6g}, "
            f"but as {family.model_type} is described it would be {expected.flatten()[at]:.6g}: its log-probabilities "
            "would be others. Its configuration was changed after the model was made, or its descriptor is wrong"
        )
