"""Measure vlmpack against what it replaces: `python -m benchmarks`. Not part of the installed package."""
