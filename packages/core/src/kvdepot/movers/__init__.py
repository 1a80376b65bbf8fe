"""Movers: processes of the depot that copy for workers."""
