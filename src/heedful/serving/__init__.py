"""The process that receives a reward model's requests, and how the workers that score them are kept alive. No model here."""
