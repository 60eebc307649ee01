"""Whole training steps: against torch's engines, by gather mode, under the profiler."""
