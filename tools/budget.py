"""Says what a model costs to train and to use, and which model of the same loss would be the cheapest.

python tools/budget.py --params 8e9 --tokens 15e12
python tools/budget.py --gpu-hours 1.3e6 --gpu h100 --inference-tokens 1e13
python tools/budget.py --recipe llama3-8b --gpus 1024

Give one or two of --params (or --recipe), --tokens and --gpu-hours; the published laws say the others. Numbers may be
written 8e9, 8B or 15T. The report lists what was assumed, with its source and the flag that changes it. Exit code 2:
the command line is wrong.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.interrupts import exit_quietly, run_main, tells_mistakes

if __name__ == "__main__":  # before the imports that take seconds
    exit_quietly()

from megatron.core.exceptions import UserError
from megatron.diagnosis.planning.budget import Rates, budget, budget_lines
from megatron.diagnosis.planning.gpus import gpu_named
from megatron.diagnosis.planning.scaling_laws import CORRECTED, PUBLISHED
from megatron.training.config.recipes.catalogue import recipe_named
from megatron.training.config.tool_flags import ToolParser, number, whole_number

LAWS = {"besiroglu2024": CORRECTED, "hoffmann2022": PUBLISHED}


@tells_mistakes
def main(argv: Sequence[str] | None = None) -> int:
    """Runs the tool and returns its exit code."""
    args = _parser().parse_args(argv)
    if args.recipe is not None and args.params is not None:
        raise UserError("give --recipe or --params, not both")
    parameters = args.params if args.recipe is None else float(_recipe(args.recipe))
    inference_mfu = args.mfu if args.inference_mfu is None else args.inference_mfu
    rates = Rates(gpu_named(args.gpu), args.mfu, inference_mfu, args.price_per_hour)
    law = LAWS[args.law]
    found = budget(rates, parameters, args.tokens, args.gpu_hours, args.inference_tokens or 0.0, law)
    print(*budget_lines(found, rates, law, args.gpus), sep="\n")
    return 0


def _recipe(name: str) -> int:
    try:
        return recipe_named(name).parameters
    except UserError as error:
        raise UserError(f"--recipe {error}") from None


def _parser() -> ToolParser:
    parser = ToolParser(prog="budget.py", description=__doc__)
    counts, share = number(1e3, 1e18, "8e9 or 8B"), number(0.001, 1, "0.4")
    parser.add_argument("--params", type=counts, metavar="N", help="parameters of the model")
    parser.add_argument("--recipe", metavar="NAME", help="take the parameters of this recipe")
    parser.add_argument("--tokens", type=counts, metavar="N", help="tokens to train on")
    parser.add_argument("--gpu-hours", type=number(1e-3, 1e12, "1.3e6"), metavar="N", help="GPU-hours of training")
    parser.add_argument(
        "--inference-tokens", type=counts, metavar="N", help="tokens that the model will read and write"
    )
    parser.add_argument("--gpu", default="h100", metavar="NAME|FILE", help="kind of GPU (default: h100)")
    parser.add_argument("--gpus", type=whole_number(10_000_000, "1024"), metavar="N", help="their number, for days")
    parser.add_argument(
        "--mfu",
        type=share,
        default=0.4,
        metavar="SHARE",
        help="share of the GPU's bf16 peak in training (default: 0.4, as Llama 3 405B had on H100: arXiv:2407.21783)",
    )
    parser.add_argument("--inference-mfu", type=share, metavar="SHARE", help="the same in use (default: that of --mfu)")
    parser.add_argument(
        "--price-per-hour", type=number(0, 1e6, "2.5"), default=2.0, metavar="PRICE", help="of a GPU (default: 2)"
    )
    parser.add_argument("--law", choices=LAWS, default="besiroglu2024", help="constants of the law of losses")
    return parser


if __name__ == "__main__":
    run_main(main)
