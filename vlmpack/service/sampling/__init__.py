"""The samplers: continuous batching on the model that is trained, or vLLM."""
