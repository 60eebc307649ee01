"""The Plan under torch.compile: a third executor of the schedule, whose verbs are nodes."""
