"""Numbers of others, to hold a project's own against."""

REFERENCES = (
    {
        "name": "chat",
        "value": 0.63,
        "half_width": None,
        "who": "researchers and crowd workers, pairs of answers in a chat",
        "paper": "Bai et al. 2022, arXiv 2204.05862",
    },
    {
        "name": "training",
        "value": 0.726,
        "half_width": 0.015,
        "who": "training labellers of InstructGPT with each other",
        "paper": "Ouyang et al. 2022, arXiv 2203.02155, section 3.4",
    },
    {
        "name": "held_out",
        "value": 0.773,
        "half_width": 0.013,
        "who": "held-out labellers of InstructGPT with each other",
        "paper": "Ouyang et al. 2022, arXiv 2203.02155, section 3.4",
    },
)
"""Published agreement of people about answers of language models."""
