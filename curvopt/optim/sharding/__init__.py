"""Models that ``fully_shard`` divides among ranks; imported where a parameter is sharded."""
