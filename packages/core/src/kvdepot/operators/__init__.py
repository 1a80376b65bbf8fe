"""A depot's output for operators and routers: KV events and metrics."""
