"""Staging: how the inputs of a step reach their static buffers."""
