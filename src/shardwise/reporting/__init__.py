"""What a run looked like: text and HTML, rendered anywhere, with no torch."""
