"""How settings are declared: fields that are flags, and the grammars of their values."""
