"""Blend: reuses text that is not a prefix."""
