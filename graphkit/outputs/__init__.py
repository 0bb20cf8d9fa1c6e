"""Outputs: from what a function returns to what its caller gets, and how long it may be read."""
