"""One page for each algorithm: its set-up, its loss and its loop."""
