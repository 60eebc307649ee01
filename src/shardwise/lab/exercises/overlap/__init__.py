"""`shardwise bench overlap`: data parallel with communication after, and inside, backward."""
