"""Training with several processes (ranks): communication, sharding and failures."""
