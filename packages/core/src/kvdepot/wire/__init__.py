"""Messages between processes, their frames, and keys for TCP."""
