"""Attention back-ends and the choice among them: block-diagonal causal (document) attention."""
