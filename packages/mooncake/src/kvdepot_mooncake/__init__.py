"""The tier in Mooncake Store. `kvdepot.tiers` finds it as the entry point `mooncake`; this module imports nothing."""
