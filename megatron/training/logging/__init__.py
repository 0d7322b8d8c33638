"""What a run says about itself: metrics on the device, the log line, metrics.jsonl, TensorBoard, a live display."""
