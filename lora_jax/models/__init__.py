"""Decoders in plain Flax NNX, and how Hugging Face checkpoints become their weights."""
