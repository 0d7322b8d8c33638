"""Scores of evaluation tasks during and after training (--eval-tasks, tools/evaluate.py)."""
