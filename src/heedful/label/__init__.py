"""People in the loop: the page where they label, its store, who gets which item, agreement between people, import and export.

Never loads torch; what models write comes from a process of its own (`heedful.rounds.sample`).
"""
