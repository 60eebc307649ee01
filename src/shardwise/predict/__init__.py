"""From a Plan and a description to a Timeline, before anything runs."""
