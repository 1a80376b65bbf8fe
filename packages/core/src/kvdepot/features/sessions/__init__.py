"""Agent sessions: named conversations whose last prefix is kept, promoted, demoted or forgotten by their name."""
