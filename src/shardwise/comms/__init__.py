"""The few collectives the engine needs. A leaf: imports nothing of shardwise outside itself."""
