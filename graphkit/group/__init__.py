"""A group: runners that share buffers and memory, how they are captured, and what is said of it."""
