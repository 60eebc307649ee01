"""Checkpoints: saved by all ranks together, loaded by any number of them."""

from shardwise.checkpoint.loading import Loaded, load
from shardwise.checkpoint.manifest import CheckpointError, CorruptCheckpoint, Manifest
from shardwise.checkpoint.read import all_of, newest, verify
from shardwise.checkpoint.saving import Saving, save

__all__ = [
    "CheckpointError",
    "CorruptCheckpoint",
    "Loaded",
    "Manifest",
    "Saving",
    "all_of",
    "load",
    "newest",
    "save",
    "verify",
]
