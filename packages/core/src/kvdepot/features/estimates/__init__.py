"""Estimates: hit rates of pools of other sizes, and the eviction policy with more hits, from a sample of lookups."""
