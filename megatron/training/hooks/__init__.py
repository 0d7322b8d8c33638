"""What only some runs do, a file each: profiling, manual garbage collection, leaving early."""
