"""Which chunks are here, who may have them, which one leaves next."""
