"""Somebody at work on a labelling project."""


def calling(name, **arguments):
    """The assistant's message that calls a tool."""
    function = {"name": name, "arguments": arguments}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": function, "id": "call00001"}],
    }


SEVERAL_TURNS = [
    calling("guess", 词="<b>香蕉</b>"),
    {"role": "tool", "content": "{'no': 1}", "name": "guess", "tool_call_id": "call00001"},
    {"role": "assistant", "content": "你喜欢\n水果吗?", "weight": 0},
    {"role": "user", "content": "喜欢 🍎"},
    {"role": "assistant", "content": "是苹果。", "reasoning_content": "也许"},
]
"""An answer of several turns, one of which is not learned."""


def send(project, person, answer, **more):
    """Label the item that a person is given next; None if there is none."""
    held = project.next_item(person)
    nonce = f"{person}-{len(project.events())}"
    return held and project.label(person, held.item.item_id, answer, nonce=nonce, seconds=1, **more)
