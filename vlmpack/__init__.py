"""vlmpack."""
