"""The commands that people run, and HTTP."""
