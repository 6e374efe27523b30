"""torch.compile around the parts of a model's layers, and not around the code between them.

    layer       checkpoint ( norm · mixer · + · norm · MLP or experts · + )
    compiled                 ^^^^   ^^^^^       ^^^^   ^^^^^^^^^^^^^^

The mixer calls attention for packed rows, which stays out of graphs. Gradient checkpointing, which transformers 5.23
does in a layer's forward, allows no such break inside of it: PyTorch gives a whole layer up without a word, and
compiles nothing. So checkpointing stays around what is compiled. Additions are all that is left between the parts.
"""

from __future__ import annotations

from typing import Any, TypeVar

from torch import nn

from vlmpack.families import family_of
from vlmpack.step.models import find_model

Model = TypeVar("Model", bound=nn.Module)


def compile_layers(model: Model, **settings: Any) -> Model:
    """Compile every part of every layer of the text model and every block of the vision tower, each in its place.

    `torch.compile(model)` also compiles the code between them, which goes through lists of images, and is compiled
    again for every number of images and every size that it has not met. Layers only see a row's width and the number of
    its patches, so with `dynamic=True`, the default here, one row is enough. Parts of a kind share what is compiled,
    however many layers there are.

    Call it before the model is wrapped or sharded. Gradient checkpointing may be switched on before or after, and off.
    Parameters, their names and what is saved stay as they are.

    Args:
        model: a `...ForConditionalGeneration` or `...ForCausalLM`, or a module that holds one, with or without packing.
        settings: of `torch.compile`: `backend`, `mode`, ... With `dynamic=None` each length is first taken for the only
            one, so everything is compiled at least twice.

    Returns:
        The same object.

    Raises:
        FamilyError: the model's family is not supported.
    """
    core = find_model(model)
    family = family_of(core)
    vision = family.vision_tower(core)
    layers = list(family.language_model(core).get_submodule("layers").children())
    layers += [] if vision is None else vision.get_submodule("blocks").children()
    for part in (part for layer in layers for part in layer.children()):
        part.compile(**{"dynamic": True, **settings})
    return model
