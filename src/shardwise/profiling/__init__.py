"""From a running step to a Timeline: `sw.profile`, `shardwise profile`."""

# What `shardwise profile` asks the ranks for, by their environment: where to write the profile, how
# many steps to profile, how many to run before.
DIRECTORY, STEPS, SKIP = "SHARDWISE_PROFILE", "SHARDWISE_PROFILE_STEPS", "SHARDWISE_PROFILE_SKIP"
