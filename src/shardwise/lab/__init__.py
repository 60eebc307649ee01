"""Benchmarks, accuracy runs and exercises. Nothing imports this room; it uses public names."""
