"""The process that receives a reward model's requests. It knows no model, loads no torch, and is never busy for long."""
