"""The engine's motion: what happens to units before and after forward and backward."""
