"""The families of Qwen and GLM whose images and videos are patches with grids, as values of a parameter."""

import pytest
from cases import families

with_grids = pytest.mark.parametrize(
    "name",
    families(lambda family: family.model_type.startswith(("qwen", "glm")) and family.has_videos and not family.audio),
)
