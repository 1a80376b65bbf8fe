"""Weights: chunks of weights that no engine uses any more are evicted first."""
