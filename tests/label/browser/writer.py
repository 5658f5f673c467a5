"""Speaks the protocol of `heedful.apps.rounds.sample`: answers the last message twice, in different words; not "fail"."""

import json
import sys
import time
from pathlib import Path

ANSWERS = (
    "Yes. Rent is owed for the days you live there, so {n} days at 41.33 each. 租金按天计算。",
    "It depends on the contract. Ask the landlord to confirm the daily share in writing. 请先查看合同 😀",
)
while Path(f"{sys.argv[1]}.loads").exists():
    time.sleep(0.02)
print(json.dumps({"ready": {"models": ["runs/secret"]}}), flush=True)
for line in sys.stdin:
    request = json.loads(line)
    if request["prompts"][0][-1]["content"] == "fail":
        print(json.dumps({"id": request["id"], "error": "runs/secret: no room for an answer"}), flush=True)
        continue
    answers = [
        [
            {"response": ANSWERS[i % 2].format(n=len(prompt)), "source": {"checkpoint": f"runs/secret-{i}"}}
            for i in range(request["answers"])
        ]
        for prompt in request["prompts"]
    ]
    print(json.dumps({"id": request["id"], "answers": answers}), flush=True)
