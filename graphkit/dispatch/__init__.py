"""Dispatch: which graph a batch gets. Pure Python, usable without a group."""
