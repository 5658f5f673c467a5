"""What transformers' trainers have in common: batches, epochs, schedule, dtype, saving, trackers, processes."""

import math

from heedful.apps.migrate.translate import Row, Translation
from heedful.apps.migrate.values import Call

EACH, ACCUMULATED = "per_device_train_batch_size", "gradient_accumulation_steps"
SCHEDULES = {"linear": "linear", "cosine": "cosine", "constant": "constant", "constant_with_warmup": "constant"}
TRACKERS = ("wandb", "trackio", "mlflow", "swanlab")


def subclass(run: Translation, trainer: Call) -> None:
    """A row for a class of the script that extends the trainer."""
    made_by = trainer.made_by
    if made_by is not None and made_by.methods:
        said = f"It has its own {', '.join(made_by.methods)}: heedful's trainer does what {trainer.short_name} does."
        run.rows.append(Row("lost", f"class {made_by.name}({trainer.short_name})", "", "", said, trainer.line))


def optimizer_rows(run: Translation) -> int | None:
    """Rows of an optimizer step, of all processes together; None if only a run could tell."""
    run.claim(EACH, ACCUMULATED)
    each, accumulated = run.number(EACH), run.number(ACCUMULATED)
    if run.ask_if_unknown(EACH, ACCUMULATED, ours="batch_size") or each is None or accumulated is None:
        return None
    rows = int(each * accumulated * run.processes)
    if rows < 1:
        for name in (EACH, ACCUMULATED):
            run.add_row("question", name, "batch_size: ?", "A batch has at least one row.")
    return rows if rows > 0 else None


def batches(run: Translation) -> None:
    """Batch and epochs of a trainer that reads data."""
    rows = optimizer_rows(run)
    if rows is not None:
        each, accumulated = int(run.number(EACH) or 1), run.number(ACCUMULATED)
        run.add_written_row(EACH, run.write("micro_batch_size", each))
        product = f"{each} rows times {accumulated:g} times {run.processes} processes."
        run.add_written_row(ACCUMULATED, run.write("batch_size", rows), product)
    epochs, most = "num_train_epochs", "max_steps"
    run.claim(epochs, most)
    if run.ask_if_unknown(epochs, ours="epochs") or run.ask_if_unknown(most, ours="max_steps"):
        return
    steps, passes = run.number(most), run.number(epochs)
    if steps is not None and steps > 0:
        run.add_written_row(most, run.write("max_steps", int(steps)), "It ends the run, whatever the epochs say.")
        if run.sets(epochs):
            run.add_row("none", epochs, note="max_steps ends the run.")
    elif passes is not None:
        run.add_written_row(epochs, run.write("epochs", int(passes) if passes == int(passes) else passes))
        if run.sets(most):
            run.add_row("none", most, note="The epochs end the run.")


def schedule(run: Translation, steps: int | None = None, *, updates: int = 1) -> None:
    """Schedule and warm-up of the learning rate.

    Args:
        steps: of heedful's run, if they are known.
        updates: steps of the origin's scheduler per step of heedful.
    """
    kind, count, share = "lr_scheduler_type", "warmup_steps", "warmup_ratio"
    run.claim(kind, count, share)
    name = str(run.value(kind)).rpartition(".")[2].lower()
    if not run.ask_if_unknown(kind, ours="lr_schedule"):
        if name in SCHEDULES:
            run.add_written_row(kind, run.write("lr_schedule", SCHEDULES[name]))
        else:
            run.add_row("lost", kind, "lr_schedule", f"heedful has {', '.join(sorted(set(SCHEDULES.values())))}.")
    if run.ask_if_unknown(count, share, ours="warmup_steps"):
        return
    if name != "constant":
        _warm_up(run, count, share, steps, updates)
    for one in (count, share):
        if run.sets(one) and not run.has_row(one):
            unused = "The other setting of the warm-up acts." if run.number(one) else "0 is no warm-up."
            note = "lr_scheduler_type constant has no warm-up there." if name == "constant" else unused
            run.add_row("none", one, note=note)


def _warm_up(run: Translation, count: str, share: str, steps: int | None, updates: int) -> None:
    """Warm-up by a number of steps, or by their share of all."""
    number, part = run.number(count) or 0, run.number(share) or 0
    source = count if number else share
    if 0 < number < 1:  # transformers 5 reads a share
        number, part = 0, number
    if number:
        note = f"{number:g} optimizer steps, of which heedful has {updates} in a step." if updates > 1 else None
        run.add_written_row(count, run.write("warmup_steps", math.ceil(number / updates)), note, differs=True)
    elif part and steps is not None:
        ours = run.write("warmup_steps", math.ceil(part * steps))
        run.add_written_row(source, ours, f"{part:g} of {steps} steps, rounded up.", differs=True)
    elif part:
        times = f"{part:g} times the number of steps, which heedful prints at the start."
        run.add_row("question", source, "warmup_steps: ?", times)


def dtype(run: Translation) -> None:
    """Precision of matrix products."""
    flags = {"bf16": "bfloat16", "fp16": "float16", "pure_bf16": "bfloat16"}
    run.claim(*flags)
    if run.ask_if_unknown(*flags, ours="dtype"):
        return
    on = [flag for flag in flags if run.value(flag) is True]
    if not on and run.full_name("bf16") in run.table and run.value("bf16") is None:
        on = ["bf16"]  # TRL from 0.19 on
    ours = run.write("dtype", flags[on[-1]] if on else "float32")
    if "pure_bf16" in on and run.value("finetuning_type") == "full":
        run.write("weights_dtype", "bfloat16")
    for flag in [flag for flag in flags if flag in on or run.sets(flag)] or ["bf16"]:
        run.add_written_row(flag, ours)


def saving(run: Translation, each: float = 1) -> None:
    """Checkpoints and evaluations. The origin counts optimizer steps, of which one of heedful's has ``each``."""
    for how, every, ours in (
        ("eval_strategy", "eval_steps", "eval_every"),
        ("save_strategy", "save_steps", "save_every"),
    ):
        old = how.replace("eval_", "evaluation_")
        run.claim(how, every, old)
        named = old if run.full_name(old) in run.given else how
        given = [name for name in (named, every) if run.full_name(name) in run.given]
        if run.ask_if_unknown(named, every, ours=ours):
            continue
        strategy, count = strategy_of(run, named), run.number(every)
        if every == "eval_steps" and count is None and strategy == "steps":
            count = run.number("logging_steps")
        if strategy == "steps" and count and count >= 1:
            written = run.write(ours, max(1, round(count / each)))
            run.add_written_row(every, written, differs=each != 1)
            if named in given:
                run.add_row("kept", named, written)
        elif strategy == "steps" and given:
            run.add_row("question", given[-1], f"{ours}: ?", f"{every} is a share of all steps: heedful counts steps.")
        elif strategy == "epoch" and given:
            run.add_row("question", given[0], f"{ours}: ?", "As many steps as an epoch has.")
        else:
            for name in given:
                run.add_row(
                    "none", name, note="heedful evaluates at the start and the end, and saves by time (save_minutes)."
                )


def strategy_of(run: Translation, name: str = "eval_strategy") -> str:
    """When the origin evaluates or saves: steps, epoch, or no."""
    value = run.value(name)
    return str(getattr(value, "name", value)).rpartition(".")[2].lower()


TRACKERS = ("wandb", "trackio", "mlflow", "swanlab")


def trackers(run: Translation) -> None:
    """Trackers; TensorBoard is always written."""
    names = ("report_to", "use_swanlab", "ppo_logger")
    if not run.claim(*names, "project", "swanlab_project"):
        return
    if run.ask_if_unknown(*names, ours="track") or run.ask_if_unknown(
        "project", "swanlab_project", ours="track_project"
    ):
        return
    given = [run.value(name) for name in names if run.sets(name)]
    wanted = [str(one) for value in given for one in (value if isinstance(value, list | tuple) else [value])]
    wanted += ["swanlab"] if run.value("use_swanlab") is True else []
    ours = [name for name in TRACKERS if name in wanted]
    for name in names:
        if run.sets(name):
            run.add_row("kept" if ours else "none", name, run.write("track", ours) if ours else "")
    project = next((run.value(name) for name in ("project", "swanlab_project") if run.sets(name)), None)
    for name in ("project", "swanlab_project"):
        if run.sets(name):
            run.add_row("kept" if ours else "none", name, run.write("track_project", project) if ours else "")


def several_processes(run: Translation) -> None:
    """Sharding and time-outs of several processes."""
    for name in ("deepspeed", "fsdp", "fsdp_config"):
        value = run.value(name)
        if run.claim(name) and value:
            stage = str(value)
            is_whole = not any(mark in stage for mark in ("z0", "z1", "stage0", "stage1", "no_shard"))
            run.add_row("differs", name, run.write("shard", "full") if is_whole else "")
    if run.claim("ddp_timeout") and run.number("ddp_timeout") is not None:
        minutes = (run.number("ddp_timeout") or 0) / 60
        fits = minutes <= 60 * 24 * 7
        run.add_row(
            "kept" if fits else "none", "ddp_timeout", run.write("distributed_timeout_minutes", minutes) if fits else ""
        )
