"""Gates: judge a run by its throughput, loss, memory and resume before it costs much (tools/validate.py)."""
