"""`shardwise bench memory`: the peak of a pass and of a step, and what holds it."""
