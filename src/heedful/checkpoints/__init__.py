"""Models and tokenizers on disk and on the Hub: names, loading, adapters, saving, and tiny models to start with."""
