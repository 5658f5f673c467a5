"""A program that labels until it is killed: ``python labeller.py PROJECT FIRST``. Each line that it prints is confirmed.

Nonces are numbers from FIRST on. Every fourth label is corrected by the owner. Of the others, the item of every eleventh is
withdrawn and put back, and every seventh is taken back. Every fifth is sent twice, and drafts are saved.
"""

import itertools
import sys

from heedful.apps.label import Project


def main(folder, first):
    """Label as person p2."""
    with Project.open(folder) as project:
        print("open", flush=True)
        for number in itertools.count(first):
            given = project.next_item("p2")
            if given is None:
                return
            item = given.item.item_id
            project.save_draft("p2", item, {"answer": {"preferred": 1}})
            answer = {"preferred": number % 2, "strength": 1 + number % 4, "both_bad": False}
            for _ in range(1 + (number % 5 == 0)):
                project.label("p2", item, answer, nonce=f"{number}", seconds=number, comment="猫\u2028🐈")
            print(f"label {number}", flush=True)
            if number % 4 == 1:
                label = project.labels()[-1].event
                project.correct("p1", label.event_id, {"strength": 1 + (number + 1) % 4}, nonce=f"correct {number}")
                print(f"correct {number}", flush=True)
            elif number % 11 == 0:
                project.withdraw("p1", items=[item], reason="猫")
                project.withdraw("p1", items=[item], back=True)
            elif number % 7 == 0:
                project.undo("p2", f"undo {number}")
                print(f"undo {number}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
