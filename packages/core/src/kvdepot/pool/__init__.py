"""The files that outlive the server: bytes, index table, names, and their locks."""
