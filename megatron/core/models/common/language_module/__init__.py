"""What models of text have in common."""
