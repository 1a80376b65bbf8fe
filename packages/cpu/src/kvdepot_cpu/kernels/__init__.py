"""The copies themselves."""
