"""`lora-jax bench`: measurements that anyone can repeat, each ending in one JSON line."""
