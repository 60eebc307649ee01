"""Measuring real runs: benchmarks and memory."""
