"""An LMCache server and a vLLM that fit together, started and stopped as one (`lmcache-stream up`)."""
