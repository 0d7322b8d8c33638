"""Lists and checks recipes: published models as flags, which --recipe NAME gives to a run.

python tools/recipes.py list [WORD]       the recipes (whose name or family has the word), with their parameters
python tools/recipes.py show NAME         the flags of one, as a file for --config, and where they are published
python tools/recipes.py verify [NAME ...] builds the models without memory, compares the number of parameters with the
                                          published one, and trains tiny versions for two steps; all without a name

Exit code 0: all is well; 1: a recipe failed its check; 2: the command line is wrong.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.interrupts import exit_quietly, run_main, tells_mistakes

if __name__ == "__main__":  # before the imports that take seconds
    exit_quietly()

from megatron.core.exceptions import UserError
from megatron.training.config.recipes.catalogue import Recipe, recipe_named, recipes
from megatron.training.config.tool_flags import ToolParser
from megatron.training.inspection.print_config import lines_of_words


@tells_mistakes
def main(argv: Sequence[str] | None = None) -> int:
    """Runs the tool and returns its exit code."""
    args = _parser().parse_args(argv)
    if args.command == "list":
        return list_recipes(args.word)
    if args.command == "show":
        return show(recipe_named(args.name))
    return verify([recipe_named(name) for name in args.names] or list(recipes().values()), args.count_only)


def _parser() -> ToolParser:
    parser = ToolParser(prog="recipes.py", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="list|show|verify")
    listing = commands.add_parser("list", help="the recipes")
    listing.add_argument("word", nargs="?", default="", help="part of a name or family")
    commands.add_parser("show", help="the flags of one").add_argument("name")
    check = commands.add_parser("verify", help="count parameters, and train tiny versions")
    check.add_argument("names", nargs="*")
    check.add_argument("--count-only", action="store_true", help="do not train")
    return parser


def list_recipes(word: str) -> int:
    """Prints a line for each recipe whose name or family has the word. Raises UserError if there is none."""
    found = [one for one in recipes().values() if word.lower() in f"{one.name} {one.title}".lower()]
    if not found:
        raise UserError(f"{word}: no recipe has this word; python tools/recipes.py list lists all")
    for one in found:
        print(f"{one.name:<24} {one.parameters:>19,}  {'published' if one.published else 'counted':<9}  {one.title}")
    return 0


def show(recipe: Recipe) -> int:
    """Prints the flags of a recipe as YAML, with its sources as comments."""
    said = f"published: {recipe.published:,} in {recipe.published_in}" if recipe.published else "no published number"
    print(f"# {recipe.name}: {recipe.parameters:,} parameters ({said}), {recipe.vocabulary:,} rows in the embedding")
    print(f"# trained by pretrain_{recipe.model_family}.py; sources: {recipe.source}")
    print(*lines_of_words(recipe.words()), sep="\n")
    return 0


def verify(chosen: Sequence[Recipe], count_only: bool) -> int:
    """Checks recipes, a line each. Returns 1 if one of them fails."""
    from megatron.diagnosis.recipe_check import count_parameters, train_tiny
    from tools.entry_scripts import BUILDERS, PROVIDERS  # seconds of imports that the other commands do without

    failed = 0
    for recipe in chosen:
        found = count_parameters(recipe, BUILDERS[recipe.model_family])
        said = "published" if recipe.published else "counted before"
        line = f"{recipe.name:<24} {found.counted:>19,} parameters, {said} {found.expected:,} ({found.error:+.3%})"
        failed += not found.is_right
        if not count_only:
            try:
                losses = train_tiny(recipe, PROVIDERS[recipe.model_family])
                line += f"; a tiny one trains: losses {', '.join(f'{loss:.3f}' for loss in losses)}"
            except UserError as error:
                line += f"; the tiny version fails: {error}"
                failed += 1
        print(line if found.is_right else f"{line}: differs from the recipe, or by more than 0.5%", flush=True)
    print(f"{len(chosen)} recipes, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    run_main(main)
