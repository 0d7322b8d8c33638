"""A filled-in specification, and ways to change it, for tests of planning."""

import re

SPECIFICATION = """\
MODEL DEFINITION
Architecture: Llama-style decoder-only
Parameter count: 7B
Vocabulary size: 32,000
Max sequence length: 4096
Training objective: causal LM
Framework: Megatron-LM's flags

HARDWARE
Total GPUs: 64
GPUs per node: 8
GPU type and memory: H100 80GB
Interconnect: NVLink intra-node, InfiniBand NDR inter-node

PARALLELISM
Tensor parallelism: derive
Pipeline parallelism: derive
Data parallelism: remaining
ZeRO stage: 1
Sequence packing: no

DATA PIPELINE
Tokenizer: Llama 2 (32,000)
Deduplication method: MinHash
Data mix: 70% web, 20% code, 10% books
Total tokens: 140B

VALIDATION GATES
Throughput target: 9,000 tokens/s/GPU
Checkpoint interval: 500 steps
Max memory utilization: 85%
Loss curve check: below 3.2 at step 1000 on a validation subset
"""


def specification(**values: str | None) -> str:
    """Returns the text with other values, by the key's first words with _ for blanks; None leaves the line out."""
    text = SPECIFICATION
    for key, value in values.items():
        name = key.replace("_", " ")
        line = re.compile(rf"^({name}[^:\n]*): .*\n", re.MULTILINE | re.IGNORECASE)
        assert line.search(text), key
        text = line.sub("" if value is None else lambda found, value=value: f"{found[1]}: {value}\n", text)
    return text
