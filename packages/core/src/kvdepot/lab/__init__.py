"""Engines without a model, and the measurements and demonstrations that use them."""
