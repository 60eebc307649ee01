"""The Plan under torch.compile: a third executor of the schedule; its verbs are a graph's nodes."""
