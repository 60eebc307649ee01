"""The engine: one sharded model on this rank. `engine.py` is where to begin."""
