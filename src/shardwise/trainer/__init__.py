"""A small trainer for language models on top of the engine."""
