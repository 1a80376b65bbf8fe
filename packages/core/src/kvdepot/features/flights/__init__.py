"""Flights: a lookup waits for chunks that another engine is computing, instead of computing them again."""
