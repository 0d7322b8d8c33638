"""How learning rate and weight decay change over a run."""
