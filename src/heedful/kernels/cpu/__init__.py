"""What makes passes on a CPU fast and small, with the same results."""
