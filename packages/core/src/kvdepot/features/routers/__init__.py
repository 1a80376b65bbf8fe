"""Routers: KV events over ZeroMQ, and news of chunks for attached engines, which publish them as their own."""
