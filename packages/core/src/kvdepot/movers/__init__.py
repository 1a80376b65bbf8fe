"""Processes of the depot that copy for a worker."""
