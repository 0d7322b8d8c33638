"""Settings of other programs as flags: JSON of DeepSpeed, files of Accelerate, TrainingArguments of Transformers.

A table answers each of their names: it becomes flags, is accepted because it cannot change a result here, or is refused
with a reason. The tables make docs/framework_keys.md. Nothing here imports those programs.
"""
