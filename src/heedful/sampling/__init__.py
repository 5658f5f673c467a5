"""From prompts to responses, and the teacher-forced pass over what was sampled."""
