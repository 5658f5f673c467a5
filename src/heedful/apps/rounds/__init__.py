"""Rounds of learning from people: sample answers, have them labelled, train a reward model, optimise the policy, measure.

``sample`` writes answers to a file or for a server, ``pairs`` selects pairs to label, ``judging`` scores items and simulates
labellers, and ``round`` runs the steps of a round.
"""
