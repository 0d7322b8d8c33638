"""Answers about a run before it starts: how long a step takes, and whether the machines suit its layout."""
