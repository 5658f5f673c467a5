"""``heedful doctor``: start a trainer up to its first step, check what it has loaded, measured and written, and say so."""

import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from heedful.algorithms.offline import whole_logprobs
from heedful.algorithms.online.learner import Learner
from heedful.algorithms.online.rollout import rollout
from heedful.algorithms.online.start import start
from heedful.apps.doctor import episodes, first_step, rewards
from heedful.apps.doctor.show import show_examples, show_findings, show_verdict
from heedful.checks.findings import Finding, LoadedRun, finding, spread
from heedful.checks.preflight import cheap_findings
from heedful.checks.records import given_away, one_answer
from heedful.checks.rendering import template_omits
from heedful.configs.checks import REFUSED
from heedful.configs.doctor import DoctorOptions
from heedful.configs.online import OnlineConfig, RolloutConfig
from heedful.configs.options import ReferenceOptions, TrainingOptions
from heedful.configs.trainers import TRAINERS
from heedful.data.batches import collate
from heedful.data.learned import learned
from heedful.display import Screen
from heedful.engines.responses import Responses
from heedful.engines.teacher_forced import token_outputs
from heedful.errors import HeedfulError, MachineError
from heedful.kernels.device import processor
from heedful.models.policy import Policy
from heedful.planning.memory import Lengths
from heedful.redact import redact
from heedful.training.checkpoints import check_space
from heedful.training.thresholds import SAMPLES
from heedful.types import MicroBatch

GROUP = 4
"""Responses to a prompt that are sampled if training compares them; prompts differ more than these do."""
MOST_READ = 256
"""Tokens of each text that the model reads before the first step."""
PASSES = 16
"""Sampled responses that policy and reference read before the first step; fewer if a micro-batch has fewer."""


@dataclass
class Examination:
    """What was found so far."""

    config: TrainingOptions
    """With a temporary output folder."""
    output: Path | None
    """Where the run would write."""
    loaded_run: LoadedRun | None = None
    findings: list[Finding] = field(default_factory=list)
    measured: dict[str, Any] = field(default_factory=dict)
    is_ours: bool = False
    """Whether heedful trained the model, by the record of its tokenizer before this run."""

    def look(self, loaded_run: LoadedRun) -> None:
        """Make the cheap checks of what a trainer has loaded."""
        self.loaded_run, self.is_ours = loaded_run, bool(learned(loaded_run.tokenizer))
        self.findings += cheap_findings(loaded_run)
        train = loaded_run.records[0]
        self.add(
            one_answer(train) or given_away(train)
        )  # made-up data for a try may have one answer, and are trained on

    def add(self, *found: Finding | None) -> None:
        """Take up what checks found; a failure that ``--allow`` names is a warning."""
        self.findings += [one for one in found if one is not None]

    def has(self, check: str) -> bool:
        """Whether a check has found something."""
        return any(one.check == check for one in self.findings)

    def measure(self, seconds: float, steps: int, device: torch.device) -> None:
        """Note how long a step took, what that foretells, and the kind of processor that took it."""
        self.measured = {
            "seconds_per_step": round(seconds, 3),
            "steps": steps,
            "step": first_step.step_time(seconds, steps),
        } | ({"processor": processor()} if device.type == "cpu" else {})

    @property
    def result(self) -> list[Finding]:
        """The findings, failures first, each check once per text; those that are allowed are warnings."""
        allowed = self.config.allow
        found = [replace(one, level="warn") if one.check in allowed else one for one in self.findings]
        return sorted(dict.fromkeys(found), key=lambda one: one.level)


def doctor(config: TrainingOptions) -> None:
    """Examine a run and print what is found. Raises SystemExit with status 2 if a check fails."""
    assert isinstance(config, DoctorOptions)
    with _only_json(config.json):
        examined = examine(config)
    found = examined.result
    is_unfit = any(one.level == "fail" for one in found)
    if config.json:
        verdict = "fail" if is_unfit else "warn" if found else "ok"
        content = {"verdict": verdict, "findings": [one.as_dict() for one in found], "measured": examined.measured}
        print(json.dumps(redact(content), ensure_ascii=False, indent=1))
    else:
        console = Screen(soft_wrap=True)
        if examined.loaded_run is not None:
            show_examples(console, examined.loaded_run, config.examples)
        show_findings(console, found, examined.measured)
        show_verdict(console, found)
    if is_unfit:
        raise SystemExit(2)


def examine(config: TrainingOptions) -> Examination:
    """Start the trainer of these settings up to its first step, take one step, and check everything on the way.

    What heedful refuses anyway is a finding too. Raises MachineError, MemoryFullError.
    """
    with tempfile.TemporaryDirectory(prefix="heedful-doctor-") as folder:
        settings = replace(config, output=Path(folder) / "run", resume="auto", overwrite=False)
        examination = Examination(settings, config.output)
        try:
            if isinstance(settings, RolloutConfig):
                examine_online(examination, settings)
            else:
                examine_offline(examination, settings)
        except HeedfulError as error:
            if error.status == MachineError.status:
                raise
            examination.add(refused(error))
    return examination


def refused(error: HeedfulError) -> Finding:
    """What heedful itself refuses, whatever is allowed: the training command's message, which says why and how to fix it."""
    return Finding(REFUSED, "fail", redact(str(error)), evidence="", why="", fix="")


def examine_offline(examination: Examination, config: TrainingOptions) -> None:
    """Trainers on given texts: the cheap checks, the machine, one step."""
    page: Any = TRAINERS[config.algorithm].page()
    learner, data = page.start(config, examination.look)
    check_machine(examination, learner, learner.model)
    check_text(examination, learner.model)
    network = learner.model.lm if isinstance(learner.model, Policy) else learner.model
    batch = [data.train[row] for row in next(learner.batches)]
    if isinstance(config, ReferenceOptions) and config.reference is not None:
        few = batch[: min(PASSES, config.micro_batch_size)]
        examination.add(far_reference(learner.model, config.reference, few, learner.pad_id))
    examination.add(*data.findings)
    before, started = first_step.weights_before(network), time.perf_counter()
    metrics = page.learn(learner, batch, config)
    seconds = time.perf_counter() - started
    examination.add(first_step.not_finite(learner.non_finite_guard))
    check_move(examination, learner, learner.model, before, metrics)
    examination.measure(seconds, learner.schedule.total_steps, next(learner.model.parameters()).device)


@torch.no_grad()
def far_reference(model: Policy, name: str, batch: Sequence[Any], pad_id: int) -> Finding | None:
    """Whether the reference is far from the policy on the chosen, or labelled, responses of a batch."""
    examples, references = zip(*(one.read_by_reference for one in batch), strict=True)
    logprobs = whole_logprobs(model, examples, pad_id).tolist()
    return first_step.far_reference(logprobs, references, [one.num_tokens for one in examples], name)


def examine_online(examination: Examination, config: Any) -> None:
    """Online trainers: besides, what the policy writes, what rewards say to it, and what all models read."""
    page: Any = TRAINERS[config.algorithm].page()
    learner: Learner[Any] = start(config, (), examine=examination.look).learner
    with contextlib.closing(learner):
        check_machine(examination, learner, learner.policy)
        check_text(examination, learner.policy)
        responses = sampled(learner)
        if learner.sampler.episodes is not None:
            responses = check_episodes(examination, learner, responses)
            if not len(responses):
                return
        completions = responses.completions
        if not examination.has("observations-long"):
            examination.add(first_step.responses_cut(responses, config))
        passes = first_passes(learner, responses)
        examination.add(first_step.ratio(passes), first_step.kl(passes, config.reference))
        examination.add(first_step.sampler_mismatch(passes, config), first_step.explores(passes, completions))
        examination.add(first_step.discount(config, float(responses.lengths.float().mean())))
        scored = rewards.score_each(learner.rewards, completions)
        for one in scored:
            unsteady = rewards.random_scores(one, completions)
            blind = None if unsteady else rewards.ignores_responses(one, completions)
            examination.add(
                rewards.fails(one, completions, config.max_failed_rewards) or rewards.empty_response(one, completions),
                rewards.constant(one, completions),
                rewards.length_alone(one, completions),
                unsteady or blind or rewards.white_space(one, completions, learner.sampler.renderer),
                None if examination.has("score-position") else rewards.reads_early(one, completions),
            )
        totals, norm_std = rewards.totals_of(learner.rewards, scored), learner.score_norm.std
        examination.add(
            rewards.cancelled(scored, totals),
            None if examination.has("reward-ignores-responses") else rewards.ties(totals, completions),
            rewards.outweighed(totals, config, norm_std),
            rewards.scale(totals, config, norm_std),
        )
        before, started = first_step.weights_before(learner.policy.lm), time.perf_counter()
        learned = page.learn(learner, page.make_experience(learner, rollout(learner, next(learner.prompts))))
        seconds = time.perf_counter() - started
        examination.add(first_step.not_finite(learner.non_finite_guard))
        if not getattr(config, "critic_warmup_steps", 0):
            check_move(examination, learner, learner.policy, before, learned.metrics)
        examination.measure(seconds, config.steps, learner.policy.device)
        for one in scored:
            examination.add(rewards.slow(one, responses=config.rollout_batch_size, step_seconds=seconds))


def check_episodes(examination: Examination, learner: Learner[Any], responses: Responses) -> Responses:
    """Whether something is wrong with environments, or the template leaves out their tools. Returns the episodes that are
    whole."""
    config, sampler = learner.config, learner.sampler
    assert sampler.episodes is not None
    examination.add(episodes.fails(responses.completions, config.max_failed_rewards))
    whole = responses[[row for row, one in enumerate(responses.completions) if not episodes.of(one).failure]]
    if len(whole):
        asked = {one.prompt.source: one.prompt for one in learner.prompts.prompts}  # without what reset has added
        completions = [replace(one, prompt=asked[one.prompt.source]) for one in whole.completions]
        examination.add(
            episodes.observations_long(whole, sampler.stop_ids, config.max_new_tokens),
            *episodes.environments(sampler.episodes, completions, config),
        )
        if not examination.has("template-omits"):
            examination.add(template_omits([one.prompt for one in whole.completions], sampler.renderer))
    return whole


def check_text(examination: Examination, model: Any) -> None:
    """Whether a language model expects the text of the data. Only tokens that are text: it need not know the template's.

    One that heedful trained may know nothing but answers, and was saved with its tokenizer.
    """
    loaded_run = examination.loaded_run
    assert loaded_run is not None
    if not isinstance(model, Policy) or examination.is_ours:
        return
    special = set(loaded_run.tokenizer.all_special_ids) | set(loaded_run.tokenizer.added_tokens_decoder)
    rows = [row.ids[:MOST_READ] for row in spread(loaded_run.rows, PASSES) if len(row.ids) > 1]
    if not rows:
        return
    batch = collate([ids[:1] for ids in rows], [ids[1:] for ids in rows], pad_id=0).to(model.device)
    logprobs = token_outputs(model, batch, temperature=1.0, micro_batch=MicroBatch(PASSES)).logprobs
    shown = batch.ids[:, -batch.response_mask.shape[1] :]
    mask = batch.response_mask & ~torch.isin(shown, torch.tensor(sorted(special), device=shown.device))
    if mask.any():
        vocabulary = len(model.lm.get_output_embeddings().weight)
        examination.add(first_step.unlikely(logprobs, mask, vocabulary))


def check_move(
    examination: Examination, learner: Any, model: Any, before: Sequence[Tensor], metrics: Mapping[str, float]
) -> None:
    """Whether the step moved the weights, if it had a gradient. By chance the few responses of one step may tie."""
    is_found = examination.has("learning-rate") or examination.has("step-not-finite")
    if model.grad_scaler is not None or is_found or not metrics.get("optimizer/grad_norm"):
        return
    network = model.lm if isinstance(model, Policy) else model
    examination.add(first_step.moved(network, before, learner.optimizer.param_groups[0]["lr"]))


def check_machine(examination: Examination, learner: Any, model: Any) -> None:
    """Memory and disk."""
    loaded_run, output = examination.loaded_run, examination.output
    assert loaded_run is not None
    new = getattr(examination.config, "max_new_tokens", 0)
    longest = max(len(row.prompt) + len(row.response) for row in loaded_run.rows)
    device = next(model.parameters()).device
    examination.add(first_step.memory(examination.config, Lengths(longest + new, longest), device, model.compute_dtype))
    if output is not None:
        try:
            check_space(replace(examination.config, output=output), learner)
        except MachineError as error:
            examination.add(finding("disk", "fail", "the disk has no room for what the run writes", str(error)))


def sampled(learner: Learner[Any]) -> Responses:
    """Responses of the policy as it starts, with random numbers of their own: `SAMPLES`, of groups if they are
    compared."""
    config = learner.config
    compares = isinstance(config, OnlineConfig) and config.estimator.compares == "prompt"
    each = (
        config.samples_per_prompt if config.judge_compares else min(config.samples_per_prompt, GROUP) if compares else 1
    )
    prompts = spread(learner.prompts.prompts, max(1, SAMPLES // each))
    repeated = [prompts[i % len(prompts)] for i in range(max(1, SAMPLES // each)) for _ in range(each)]
    return learner.sampler.generate(learner.policy, repeated, torch.Generator().manual_seed(config.seed))


def first_passes(learner: Learner[Any], responses: Responses) -> first_step.FirstPasses:
    """What policy and reference read of the first sampled responses, as the first step would."""
    few = responses[: min(PASSES, learner.config.micro_batch_size)]
    batch, config = few.batch, learner.config
    new = learner.policy(batch.ids, batch.attention_mask, batch.response_mask, temperature=config.temperature)
    return first_step.FirstPasses(
        mask=batch.response_mask,
        sampler=few.logprobs,
        old=learner.token_outputs(learner.policy, batch).logprobs,
        new=new.logprobs.detach(),
        reference=None if learner.reference is None else learner.token_outputs(learner.reference, batch).logprobs,
        dtype=learner.policy.compute_dtype,
    )


@contextlib.contextmanager
def _only_json(asked: bool) -> Iterator[None]:
    """Send what this process and those that it starts print to standard error, if standard output is for JSON."""
    if not asked:
        yield
        return
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
