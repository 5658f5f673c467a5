"""A process that speaks the protocol of `heedful.apps.rounds.sample` without a model: a test says how it behaves.

A prompt "die" kills it, "fail" is refused, "hang" is never answered; "stray" has it print what is no answer first. Every
other is answered by its text and a number.
"""

import json
import os
import sys
import time

if len(sys.argv) > 1 and "cannot start" in sys.argv[1]:
    print(json.dumps({"error": "runs/secret-policy: there is no such model"}), flush=True)
    sys.exit(2)
print(json.dumps({"ready": {"models": ["runs/secret-policy/final"]}}), flush=True)
for line in sys.stdin:
    request = json.loads(line)
    texts = [one if isinstance(one, str) else one[-1]["content"] for one in request["prompts"]]
    if "die" in texts:
        os._exit(9)
    if "hang" in texts:
        time.sleep(3600)
    if "stray" in texts:
        sys.stdout.buffer.write(b'[1]\n3\n"id"\nnull\n{"id": [1]}\n\xff\xfe{"ready"\n')
    if "fail" in texts:
        print(json.dumps({"id": request["id"], "error": "runs/secret-policy: no room for an answer"}), flush=True)
        continue
    answers = [
        [
            {"response": f"{text} 😀\u2028{i}", "source": {"checkpoint": "runs/secret-policy/final", "seed": i}}
            for i in range(request["answers"])
        ]
        for text in texts
    ]
    print(json.dumps({"id": request["id"], "answers": answers}), flush=True)
