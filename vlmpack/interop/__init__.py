"""What other projects' names and rows map to."""
