"""The documentation, and what keeps its tables up to date."""
