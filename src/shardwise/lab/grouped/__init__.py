"""The grouped step of a replicated model, in torch and in MLX, against averaged gradients."""
