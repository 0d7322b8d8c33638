"""Mock data for tests: fewer documents than a user gets.

100,000 documents are ten million samples of a test's few tokens each. Shuffling them took a third of the suite's time.
"""

from megatron.data.datasets.gpt_dataset import MockGPTLowLevelDataset

NUM_DOCUMENTS = MockGPTLowLevelDataset.num_documents


def make_small() -> None:
    """Gives mock data of this process 1,000 documents."""
    MockGPTLowLevelDataset.num_documents = 1_000
