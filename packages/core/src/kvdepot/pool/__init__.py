"""The files that outlive the server: KV bytes, the index table, names, and files of features; and their locks."""
