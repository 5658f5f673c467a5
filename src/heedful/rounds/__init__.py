"""Rounds of learning from people: sample answers, have them labelled, train a reward model, optimise the policy, measure.

``sample`` writes answers into a file and for a server, ``pairs`` chooses which to ask about, ``judging`` scores items and
labels them in the place of people, and ``round`` takes a project from one step to the next.
"""
