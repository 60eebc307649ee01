"""Checkpoints of other programs, in and out: Hugging Face and torch DCP."""

from shardwise.interchange.origins import load

__all__ = ["load"]
