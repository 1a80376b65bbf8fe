"""What the processes of a depot have in common."""
