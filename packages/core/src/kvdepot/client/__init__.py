"""The engine's side: a connection that comes back by itself, lookups for schedulers, transfers for workers."""
