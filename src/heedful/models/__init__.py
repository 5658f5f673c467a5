"""The networks: policy, reward model, value model, and the heads on them."""
