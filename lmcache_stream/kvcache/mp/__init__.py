"""A running LMCache multiprocess (MP) server as a KV cache."""
