"""FlashAttention-2: `attention`, and `FlashAttention` for autograd."""

from shardwise.kernels.attention.interface import FlashAttention, attention

__all__ = ["FlashAttention", "attention"]
