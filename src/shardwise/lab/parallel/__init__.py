"""The assignment's questions about several ranks: collectives, data parallel, sharded state."""
