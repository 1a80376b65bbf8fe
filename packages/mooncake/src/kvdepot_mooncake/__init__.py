"""The tier in Mooncake Store. `kvdepot` finds it as the entry point `mooncake`; this imports nothing."""
