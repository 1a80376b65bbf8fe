"""The tier on a local file system."""
