"""Two models on the same responses: what plain transformers says of each token, by both."""

import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM

from heedful import make_tiny_model
from heedful.models import Policy
from heedful.models.save import save_policy
from logged_runs import GAME, PLAYED, ids_of, unpacked

pytestmark = pytest.mark.exhaustive


def logprobs(folder, prompt, response, temperature):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    begin, ids = len(ids_of(prompt)), ids_of(prompt) + ids_of(response)
    with torch.no_grad():
        found = (model(torch.tensor([ids])).logits[0] / temperature).log_softmax(-1)
    return [float(found[t - 1, ids[t]]) for t in range(begin, len(ids))]


def test_both_read_every_token(log_run, heedful, tiny, tmp_path):
    make_tiny_model("gpt2", tmp_path / "other", hidden_size=32, max_length=128, seed=7)
    run = log_run(steps=2, settings={"temperature": 0.7})
    heedful(
        "report", str(run), "--compare", tiny(), str(tmp_path / "other"), output=tmp_path / "p.html", dtype="float32"
    )
    header, _, columns = unpacked((tmp_path / "p.html").read_text(encoding="utf-8"))
    one, other, difference = header["compared"]
    assert difference.endswith("other minus " + one.removesuffix(": log-prob"))
    pairs = [("2+2?", "四 4"), ("hi", "hello")] * 2
    for name, folder in ((one, tiny()), (other, tmp_path / "other")):
        exact = [number for prompt, response in pairs for number in logprobs(folder, prompt, response, 0.7)]
        assert columns[name] == pytest.approx(exact, rel=1e-3, abs=1e-4)
    assert columns[difference] == pytest.approx(columns[other] - columns[one], abs=0.02)


def test_what_the_other_one_said_is_read(log_run, heedful, tiny, tmp_path):
    """Both models read it between the turns, and only the policy's own tokens have numbers."""
    run = log_run(steps=1, responses=PLAYED[:1], episodes=[GAME])
    heedful("report", str(run), "--compare", tiny(), tiny(), output=tmp_path / "p.html", dtype="float32")
    header, _, columns = unpacked((tmp_path / "p.html").read_text(encoding="utf-8"))
    own = [message["role"] == "assistant" for message in GAME["turns"] for _ in ids_of(message["content"])]
    exact = logprobs(tiny(), "猜词", "".join(message["content"] for message in GAME["turns"]), 1.0)
    expected = [number for number, is_own in zip(exact, own, strict=True) if is_own]
    assert columns[header["compared"][0]] == pytest.approx(expected, rel=1e-3, abs=1e-4)


def test_values_of_two_value_heads(log_run, heedful, tiny, tmp_path):
    for name, weight in (("a", 0.0), ("b", 0.5)):
        policy = Policy.from_pretrained(tiny(), value_head=True, device="cpu", dtype="float32")
        torch.nn.init.constant_(policy.value_head.weight, weight)
        save_policy(policy, policy.tokenizer, tmp_path / name, stop_ids=())
    run = log_run(steps=1)
    heedful("report", str(run), "--compare", str(tmp_path / "a"), str(tmp_path / "b"), output=tmp_path / "p.html")
    header, _, columns = unpacked((tmp_path / "p.html").read_text(encoding="utf-8"))
    assert "a: value" in header["compared"]
    assert set(columns["a: value"]) == {0.0}
    assert abs(columns["b: value"]).min() > 0


def test_what_cannot_be_compared(log_run, heedful, tiny, tmp_path):
    run = log_run(steps=1)
    shutil.copytree(tiny(), tmp_path / "empty")
    (tmp_path / "empty" / "model.safetensors").unlink()
    outcome = heedful("report", str(run), "--compare", tiny(), str(tmp_path / "empty"), output=tmp_path / "p.html")
    assert outcome.status == 2
    assert "empty" in outcome.err
    assert not (tmp_path / "p.html").exists()
