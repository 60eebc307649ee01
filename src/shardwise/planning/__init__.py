"""Pure functions and values: no process group, no device."""
