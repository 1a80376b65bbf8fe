"""The compiled copies and moves."""
