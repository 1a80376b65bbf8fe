"""The operators' side of a depot: commands, events, TCP."""
