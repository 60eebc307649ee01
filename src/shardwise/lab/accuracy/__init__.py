"""Predictions against measurements and reports: `shardwise bench accuracy`."""
