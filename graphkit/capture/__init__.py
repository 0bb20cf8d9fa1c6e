"""Capture: sessions, eager breaks, and what is watched meanwhile."""
