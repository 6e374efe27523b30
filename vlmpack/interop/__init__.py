"""Conversion to and from other projects: Megatron-Core batches, and SeqPacker's API."""
