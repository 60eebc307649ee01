"""The documents' exercises on paper, worked out and printed."""
