"""One process as a rank of any mesh: `shardwise emulate`."""
