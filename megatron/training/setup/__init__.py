"""Makes a Trainer that is ready to train, from a config and the providers of a script."""
