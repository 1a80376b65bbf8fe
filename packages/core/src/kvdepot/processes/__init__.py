"""Helpers that all processes of a depot share."""
