"""Somebody at work on a labelling project."""


def send(project, person, answer, **more):
    """Label the item that a person is given next; None if there is none."""
    held = project.next_item(person)
    nonce = f"{person}-{len(project.events())}"
    return held and project.label(person, held.item.item_id, answer, nonce=nonce, seconds=1, **more)
