"""ModelOpt's names that entry scripts of Megatron-LM call in every run, with and without ModelOpt.

Its other names can be imported and raise UserError when they are used (megatron.homes).
"""

import argparse


def add_modelopt_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Returns the parser without further arguments: the command line knows ModelOpt's flags and answers them."""
    return parser


def modelopt_args_enabled(args: object) -> bool:
    """Returns False: no flag turns ModelOpt on."""
    return False
