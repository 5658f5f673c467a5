"""One module per algorithm: set-up, loss and loop."""
