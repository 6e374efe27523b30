"""Benchmarks of vlmpack against the code that it replaces: `python -m benchmarks`. Not in the installed package."""
