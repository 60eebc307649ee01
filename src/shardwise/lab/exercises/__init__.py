"""The profiling exercises of seed 004 as benchmarks."""
