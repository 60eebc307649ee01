"""What stands out in a run, in sentences."""
