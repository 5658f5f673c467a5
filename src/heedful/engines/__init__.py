"""Sample responses to prompts, and run the teacher-forced pass over them."""
