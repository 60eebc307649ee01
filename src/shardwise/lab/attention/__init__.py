"""Attention, backend against backend: `shardwise bench attention`."""
