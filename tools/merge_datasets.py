"""Merges all datasets (.bin and .idx) of a folder into one, in the order of their names.

python tools/merge_datasets.py --input parts --output-prefix whole
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.interrupts import exit_quietly, run_main, tells_mistakes, warn

if __name__ == "__main__":  # before the imports that take seconds
    exit_quietly()

from megatron.data.datasets.indexed_dataset import IndexedDataset
from megatron.data.preparation.dataset_merging import find_prefixes, merge_datasets


@tells_mistakes
def main(argv: Sequence[str] | None = None) -> int:
    """Runs the tool and returns its exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--input", required=True, metavar="DIR", help="folder of .bin and .idx files")
    parser.add_argument("--output-prefix", required=True, metavar="P", help="path of the result, without .bin")
    parser.add_argument("--multimodal", action="store_true", help="the data sets have a mode for each sequence")
    args = parser.parse_args(argv)
    try:
        prefixes = find_prefixes(args.input)
        merge_datasets(prefixes, args.output_prefix, warn, args.multimodal)
        merged = IndexedDataset(args.output_prefix, multimodal=args.multimodal)
    except KeyboardInterrupt:
        print("interrupted; no data set was written; give the same command again", file=sys.stderr)
        return 130
    tokens = int(merged.sequence_lengths.sum(dtype="int64"))
    print(
        f"{args.output_prefix}: {len(prefixes)} data sets, {len(merged.document_indices) - 1:,} documents, "
        f"{len(merged):,} sequences, {tokens:,} tokens ({merged.dtype.name})"
    )
    return 0


if __name__ == "__main__":
    run_main(main)
