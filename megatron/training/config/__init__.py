"""The settings of a run: dataclasses whose fields are the flags of the command line.

`flag_table` makes the flags from the fields. `command_line` parses argv, `derived_values` fills in what follows from
other values, `checks` contains the rules between values, and `resolution` runs these steps and builds a
`pretrain_config.PretrainConfig`.
"""
