"""From a running step to a Timeline: `sw.profile`, `shardwise profile`."""
