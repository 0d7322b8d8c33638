"""What people ask about a run: its memory before it starts, whether layouts agree, why a step went wrong."""
