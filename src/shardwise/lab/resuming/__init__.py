"""Runs that are killed and resumed, compared with the same ones uninterrupted."""
