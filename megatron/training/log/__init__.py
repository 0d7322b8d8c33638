"""The log of a run: metrics on the device, the log line, metrics.jsonl, TensorBoard, the console."""
