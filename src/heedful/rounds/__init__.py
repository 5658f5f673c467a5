"""Rounds of learning from people: sample answers, have them labelled, train a reward model, optimise the policy, measure.

``sample`` writes answers into a file and ``sample_worker`` for a server, ``active`` chooses which pairs to ask about,
``simulated`` labels in the place of people, and ``round`` takes a project from one step to the next.
"""
