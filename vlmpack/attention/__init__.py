"""Attention back-ends and the choice among them: causal attention under a document (block-diagonal) mask."""
