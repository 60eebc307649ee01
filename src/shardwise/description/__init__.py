"""Facts only: what a model computes and keeps, what a cluster can do, what a step must do."""
