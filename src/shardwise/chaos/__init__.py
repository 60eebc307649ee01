"""Faults, injected into real jobs, and what became of them: `shardwise chaos`."""
