"""A runner: one function with its policy, buckets, inputs and outputs."""
