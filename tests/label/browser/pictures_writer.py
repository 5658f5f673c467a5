"""Writes the chat answers of the pictures, in the protocol of `heedful.apps.rounds.sample`."""

import json
import sys

from pictures_content import CHAT_ANSWERS

print(json.dumps({"ready": {"models": ["runs/ppo"]}}), flush=True)
for line in sys.stdin:
    request = json.loads(line)
    answers = [
        [{"response": text, "source": {}} for text in CHAT_ANSWERS[: request["answers"]]] for _ in request["prompts"]
    ]
    print(json.dumps({"id": request["id"], "answers": answers}), flush=True)
