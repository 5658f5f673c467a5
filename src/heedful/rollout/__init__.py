"""From a model to experience: sampling, and the teacher-forced pass over what was sampled."""
