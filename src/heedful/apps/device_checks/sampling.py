"""Sampling on a device, and the CUDA graphs that record it."""

import warnings
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from heedful.apps.device_checks.result import RAGGED, LeftOutError, Measurement, Workbench, differing, expect, furthest
from heedful.configs.options import SamplingOptions
from heedful.devices import device_module
from heedful.engines.cuda_graph import POSITIONS, GraphDecoder, graph_decoder
from heedful.engines.decoder import Decoder, SamplingModel
from heedful.engines.generate import generate
from heedful.engines.responses import Responses
from heedful.engines.teacher_forced import token_outputs
from heedful.kernels.device import DtypeName
from heedful.models.policy import Policy
from heedful.models.tiny import Architecture
from heedful.types import MicroBatch

SCORED = "log-probs of sampled tokens, from those of a pass over all tokens"


def _sampled(policy: Policy, *, cuda_graphs: Literal["on", "off"] = "off") -> Responses:
    """Greedy responses to all prompts, of which some end early."""
    options = SamplingOptions(max_new_tokens=50, temperature=0.0, cuda_graphs=cuda_graphs)
    rest: Any = {"pad_id": 0, "generator": torch.Generator(), "micro_batch": MicroBatch(10)}
    return generate(policy, RAGGED, options, stop_ids=tuple(range(3, 60)), **rest)


def greedy_sampling(bench: Workbench) -> Measurement:
    """Greedy responses on the device and on the CPU."""
    options, found = SamplingOptions(max_new_tokens=20, temperature=0.0), []
    for device in (None, "cpu"):
        policy = bench.policy(device=device)
        rollouts = generate(policy, RAGGED[:4], options, stop_ids=(1,), pad_id=0, generator=torch.Generator())
        found.append(rollouts.own_ids())
    return Measurement(differing(*found), 0, "responses that are not the CPU's")


def sampled_logprobs(bench: Workbench, dtype: DtypeName) -> Measurement:
    """Log-probs of sampled tokens, one token at a time with a cache, against a pass over all of them."""
    policy, options = bench.policy(dtype, spread=0.1), SamplingOptions(max_new_tokens=50)
    generator = torch.Generator().manual_seed(0)
    found = generate(policy, RAGGED, options, stop_ids=tuple(range(3, 60)), pad_id=0, generator=generator)
    return Measurement(_off(policy, found), 1e-4 if dtype == "float32" else 0.05, SCORED)


def _off(policy: Policy, sampled: Responses) -> float:
    """Largest difference of the sampler's log-probs from those of a pass over all tokens."""
    scored = token_outputs(policy, sampled.batch, temperature=1.0, micro_batch=MicroBatch(20)).logprobs
    mask = sampled.batch.response_mask
    return furthest([(sampled.logprobs[mask], scored[mask])])


def recorded_sampling(bench: Workbench, dtype: DtypeName) -> Measurement:
    """Over two batches, with rows that leave, before and after the weights change in place.

    In half precision the fixed cache rounds elsewhere, so its tokens are its own; their log-probs are those of the
    teacher-forced pass up to that rounding, 2 ** -8 of logits of a few units.
    """
    policy, all_responses, off = bench.policy(dtype, spread=0.1), [], []
    for _ in range(2):
        found = _sampled(policy, cuda_graphs="on")
        responses = found.own_ids()
        all_responses.append(responses)
        if dtype == "float32":
            apart = differing(responses, _sampled(policy).own_ids())
            expect(apart == 0, f"{apart} of {len(responses)} responses are not those without graphs")
        off.append(_off(policy, found))
        _change(policy.lm)
    expect(all_responses[0] != all_responses[1], "changed weights give the same responses")
    lengths = [len(response) for response in all_responses[0]]
    expect(min(lengths) <= 16 < max(lengths), f"no rows leave on the way: {min(lengths)} to {max(lengths)} tokens")
    return Measurement(max(off), 1e-4 if dtype == "float32" else 0.05, SCORED)


def _change(lm: PreTrainedModel) -> None:
    with torch.no_grad():
        for parameter in lm.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))


def _greedy(model: SamplingModel, steps: int, kept: Sequence[int]) -> list[list[int]]:
    """Greedy tokens; halfway, only the rows ``kept`` continue."""
    decoder = Decoder(model, num_rows=len(RAGGED), longest=max(map(len, RAGGED)) + steps, pad_id=0)
    with torch.no_grad():
        ids, tokens = decoder.read_prompts(RAGGED).argmax(-1), torch.empty(len(RAGGED), 0, dtype=torch.long)
        for step in range(steps):
            if step == steps // 2:
                decoder.keep(kept)
                ids, tokens = ids[kept], tokens[kept]
            tokens = torch.cat((tokens, ids[:, None].cpu()), dim=1)
            ids = decoder.read_tokens(ids).argmax(-1)
    found: list[list[int]] = tokens.tolist()
    return found


def _model(policy: Policy, *, records: bool) -> SamplingModel:
    """A policy's own model, not a copy, decoded with graphs or by the same steps without."""
    model = SamplingModel(policy.eval())
    model.lm = policy.lm
    model.graph = graph_decoder(policy.lm, policy.compute_dtype)
    assert model.graph is not None  # else a warning says why
    if not records:
        model.graph = GraphDecoder(policy.lm, policy.compute_dtype, capture=False)
    return model


def graphs(bench: Workbench, architecture: Architecture) -> Measurement:
    """Token for token, with rows that leave and attention that becomes longer; the second time from the same graphs."""
    policy, steps, kept = bench.policy(architecture=architecture, spread=0.1), POSITIONS + 20, [6, 1, 17]
    model = _model(policy, records=True)
    expected = _greedy(_model(policy, records=False), steps, kept)
    apart = [differing(_greedy(model, steps, kept), expected) for _ in range(2)]
    # Twenty rows; three rows, and then three over more positions.
    recorded = _recorded(model)
    expect(len(recorded) == 3, f"{len(recorded)} graphs were recorded, not 3")
    return Measurement(sum(apart), 0, "responses that are not those of single kernels")


def _recorded(model: SamplingModel) -> dict[tuple[int, int], object]:
    assert model.graph is not None
    return model.graph.graphs


def graphs_of_changed_weights(bench: Workbench, dtype: DtypeName) -> Measurement:
    """An old graph reads weights that changed in place, under autocast too; tensors that take their place are found."""
    policy, kept = bench.policy(architecture="qwen2", spread=0.1), range(20)
    policy.compute_dtype = getattr(torch, dtype)
    model, lm = _model(policy, records=True), policy.lm
    before, old = _greedy(model, 12, kept), _recorded(model)
    saved = {name: tensor.clone() for name, tensor in lm.state_dict().items()}
    _change(lm)
    after = _greedy(model, 12, kept)
    expect(_recorded(model) == old, "other graphs were recorded")
    expect(after != before, "changed weights give the same responses")
    apart = differing(after, _greedy(_model(policy, records=False), 12, kept))
    lm.load_state_dict(saved, assign=True)
    lm.tie_weights()
    return Measurement(apart + differing(_greedy(model, 12, kept), before), 0, "responses of other weights")


def steps_without_waiting(bench: Workbench) -> Measurement:
    """No step waits for the device, as torch itself sees it."""
    module = device_module(bench.device)
    if not hasattr(module, "set_sync_debug_mode"):
        raise LeftOutError(f"{bench.device.type} does not tell when it is waited for")
    model = _model(bench.policy(spread=0.1), records=True)
    decoder = Decoder(model, num_rows=len(RAGGED), longest=max(map(len, RAGGED)) + 20, pad_id=0)
    with torch.no_grad():
        ids = decoder.read_tokens(decoder.read_prompts(RAGGED).argmax(-1)).argmax(-1)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch calls the mode a prototype
                module.set_sync_debug_mode("error")
            for _ in range(5):
                ids = decoder.read_tokens(ids).argmax(-1)
        finally:
            module.set_sync_debug_mode("default")
    return Measurement(0, 0, "waits in five steps")


def model_that_waits(bench: Workbench) -> Measurement:
    """A model that cannot be recorded decodes without graphs, with one warning that has the cause."""
    policy, kept = bench.policy(architecture="llama", spread=0.1), range(20)
    expected = _greedy(_model(policy, records=False), 12, kept)

    def wait(_module: object, _inputs: object, output: dict[str, Tensor]) -> None:
        output["logits"].sum().item()

    policy.lm.register_forward_hook(wait)
    model, stream = _model(policy, records=True), torch.cuda.current_stream()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        apart = differing(_greedy(model, 12, kept), expected)
    told = [str(one.message) for one in caught if "cannot be captured as a CUDA graph" in str(one.message)]
    expect(len(told) == 1, f"{len(told)} warnings that it cannot be captured")
    expect("previous error" not in told[0], f"the warning does not have the cause: {told[0]}")
    expect(torch.cuda.current_stream() == stream, "the stream of the failed recording is still current")
    return Measurement(apart, 0, "responses that are not those of single kernels")
