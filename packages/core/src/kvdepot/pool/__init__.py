"""The files that outlive the server: the pool's bytes, the index table, names, sessions and tokens, and their locks."""
