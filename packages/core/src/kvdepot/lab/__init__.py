"""Engines without a model, and what is measured and shown with them."""
