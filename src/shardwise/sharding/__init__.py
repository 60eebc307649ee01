"""The engine's storage: where every tensor of a unit lives, and how it is attached to modules."""
