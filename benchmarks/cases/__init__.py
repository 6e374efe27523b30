"""The benchmark cases: one function each, from settings and shapes to figures."""
