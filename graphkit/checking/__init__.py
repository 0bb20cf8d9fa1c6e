"""Checking: proofs that a graph computes what its function does."""
