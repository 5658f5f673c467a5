"""A run's model on the Hugging Face Hub, with a card that documents its origin."""
