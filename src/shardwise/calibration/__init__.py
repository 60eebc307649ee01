"""Measured rates of this machine, as a cluster file: `shardwise calibrate`."""
