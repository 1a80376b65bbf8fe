"""Peers: depots of other nodes that read chunks from this one's pool, and from which it reads. Imports nothing."""
