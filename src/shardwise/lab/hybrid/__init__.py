"""Hybrid sharding with a delayed all-reduce, measured, emulated and predicted."""
