"""A tiny language model served with CUDA graphs and speculative decoding, as a tutorial."""
