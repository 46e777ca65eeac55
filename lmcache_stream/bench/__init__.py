"""Measures what editing a KV cache does: to speed and to answers."""
