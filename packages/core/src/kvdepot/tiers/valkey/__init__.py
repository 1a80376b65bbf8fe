"""The tier in Valkey or Redis."""
