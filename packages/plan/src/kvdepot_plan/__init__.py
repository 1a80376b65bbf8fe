"""Plans pools and nodes from a trace. `kvdepot` finds the command `replay` as an entry point; this imports nothing."""
