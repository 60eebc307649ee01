"""Kernels and their plain references. Imports nothing else of shardwise."""
