"""The settings of a run: one dataclass a concern, whose fields are the flags of the command line.

`pretrain_config` joins them, `flag_table` reads the flags off them, `command_line` reads argv, `derived_values` fills
in what follows from other values, `checks` holds the rules between them.
"""
