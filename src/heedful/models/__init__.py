"""The networks (policy, reward model, value model) and their tokenizers: in memory, on disk, and on the Hub."""
