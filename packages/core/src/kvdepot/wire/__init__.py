"""Messages between processes, and their frames."""
