"""shardwise against every other engine of its kind, class by class."""
