"""What processes say to each other: messages, their frames, keys for TCP."""
