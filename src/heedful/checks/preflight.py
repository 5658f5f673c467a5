"""The cheap checks, which every training command makes of what it has just loaded, before anything is written."""

from collections.abc import Callable, Sequence
from pathlib import Path

from heedful.checks import arithmetic, encoded, loaded, records, rendering
from heedful.checks.findings import Finding, LoadedRun
from heedful.data.splits import HasPrompt
from heedful.display import say
from heedful.errors import ConfigError
from heedful.rewards.models import model_rewards
from heedful.types import Prompt

FIRST = 8
"""Prompts to which a reward model is shown an answer: a template renders all of them alike."""
Examine = Callable[[LoadedRun], None]
"""What a trainer calls once all is loaded."""


def cheap_findings(loaded_run: LoadedRun) -> list[Finding]:
    """What is found without a pass through a model, failures first."""
    config, rows, tokenizer = loaded_run.config, loaded_run.rows, loaded_run.tokenizer
    train, held_out = loaded_run.records
    steps = arithmetic.total_steps(config, len(train))
    found = [
        loaded.raw_prompts(loaded_run),
        records.contradictions(train),
        records.repeated(train),
        records.template_in_text(train, loaded_run.renderer),
        records.answer_repeats(train),
        records.refusals(train),
        records.labels_swapped(train, config.columns),
        records.unknown_tokens(rows, tokenizer),
        records.held_out_most(loaded_run.counts, config.eval_data),
        arithmetic.lost_steps(config, loaded_run.model.get_input_embeddings().weight, steps),
        arithmetic.warm_up(config, steps),
        arithmetic.sampling(config),
        arithmetic.beta(config),
        arithmetic.entropy_bonus(config),
        encoded.double_bos(rows, tokenizer),
        encoded.equal_pairs(loaded_run.counts),
        encoded.share_cut(loaded_run.counts),
        encoded.held_out_trained_on(train, held_out),
        loaded.untrained_tokens(loaded_run.model, rows, tokenizer, needs=needed_end(loaded_run)),
        loaded.zero_layer(loaded_run.model),
        loaded.learning_rate(config, loaded_run.model.get_input_embeddings().weight.shape[1]),
    ]
    if loaded_run.stop_ids and rows[0].response:
        plain = {one.source for one in train if not one.prompt}  # pieces of which end where the model's context does
        answers = [row for row in rows if row.source not in plain]
        marked = encoded.marked_frac([one for one in train if one.prompt])
        found.append(encoded.end_token(answers, loaded_run.stop_ids, tokenizer, marked_frac=marked))
        if not config.learns_prompts:  # with the ends of all turns
            found.append(encoded.stop_inside(answers, loaded_run.stop_ids, tokenizer))
            found.append(encoded.answers_cut(answers, loaded_run.stop_ids, tokenizer))
    if loaded_run.renderer is not None:
        found.append(encoded.generation_mask(train, loaded_run.renderer))
        found += template_findings(train, loaded_run)
    if loaded_run.reward_model is not None:
        found.append(loaded.score_position(loaded_run.reward_model, rows, tokenizer))
    if loaded_run.rewards:
        found += reward_model_findings(loaded_run)
    if loaded_run.rewards and not loaded_run.resumes:
        found.append(
            loaded.own_answer(loaded_run.rewards, [one for one in (*train, *held_out) if isinstance(one, Prompt)])
        )
    return sorted((one for one in found if one is not None), key=lambda one: one.level)


def template_findings(train: Sequence[HasPrompt], loaded_run: LoadedRun) -> list[Finding | None]:
    """What the chat templates of the model and of reward models leave out, each once."""
    of_rewards = [reward.inputs.renderer for _, reward in model_rewards(loaded_run.rewards)]
    found: list[Finding | None] = []
    for renderer in [loaded_run.renderer, *of_rewards]:
        if renderer is not None:
            found += [rendering.template_omits(train, renderer), rendering.roles_alike(renderer, train)]
    return list(dict.fromkeys(found))


def needed_end(loaded_run: LoadedRun) -> list[int]:
    """The token with which the policy has to end its responses, also if no record shows it."""
    if loaded_run.renderer is None or not loaded_run.stop_ids:
        return []
    is_chat = not isinstance(loaded_run.records[0][0].prompt, str)
    return [loaded_run.renderer.turn_end_id if is_chat else loaded_run.tokenizer.eos_token_id]


def reward_model_findings(loaded_run: LoadedRun) -> list[Finding | None]:
    """What reward models among the rewards say of themselves."""
    prompts = [(one.source, one.prompt) for one in loaded_run.records[0][:FIRST]]
    found = [loaded.templates_differ(loaded_run.rewards, loaded_run.tokenizer, [prompt for _, prompt in prompts])]
    for name, reward in model_rewards(loaded_run.rewards):
        found.append(loaded.guesses(name, Path(reward.inputs.tokenizer.name_or_path)))
        rows = loaded.reward_rows(reward.inputs, prompts)
        found.append(loaded.score_position(reward.model, rows, reward.inputs.tokenizer))
    return found


def refuse_unfit(loaded_run: LoadedRun) -> None:
    """Print a line for each warning; end the command if a check fails that ``--allow`` does not name.

    A run that resumes has heard its warnings. Raises ConfigError.
    """
    found = cheap_findings(loaded_run)
    failed = [one for one in found if one.level == "fail" and one.check not in loaded_run.config.allow]
    if failed:
        names = " ".join(dict.fromkeys(one.check for one in failed))
        lines = [f"{one.line}. {one.why}" for one in failed]
        raise ConfigError("\n".join([*lines, f"heedful doctor shows more; --allow {names} begins all the same"]))
    if not loaded_run.resumes:
        for one in found:
            say(f"WARNING: {one.line}")
