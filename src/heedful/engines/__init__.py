"""Sampling of responses to prompts, and the teacher-forced pass over them."""
