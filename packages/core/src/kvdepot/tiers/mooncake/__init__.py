"""The tier in Mooncake Store."""
