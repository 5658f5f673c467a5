"""The process that receives a reward model's requests, and how the workers are kept alive that score them. It knows no model."""
