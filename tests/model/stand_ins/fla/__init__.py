"""Stands in for flash-linear-attention 0.6.0 where there is no GPU: the same signature and refusals, plain PyTorch.

transformers takes it for the real one if its folder is on PYTHONPATH when the models are imported.
"""

__version__ = "0.6.0"
