"""Evaluation tasks: the file that describes them, their documents, and the token rows that a model must score."""
