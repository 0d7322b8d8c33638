"""From a config and the providers of a script to a Trainer that is ready to train."""
