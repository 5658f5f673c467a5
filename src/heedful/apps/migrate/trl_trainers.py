"""Scripts that use a trainer of TRL from 0.12 on, and its SFT, DPO and reward trainers before."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from heedful.apps.migrate import common
from heedful.apps.migrate.objects import data_name, functions_file, lora_config, model_name, reward_name
from heedful.apps.migrate.script import Script
from heedful.apps.migrate.translate import Origin, Row, Translation, yaml_text
from heedful.apps.migrate.values import Call, Function, Imported, source_text
from heedful.configs.peers import peers

PEER = "trl"
REWARDS = "rewards.py"
POSITIONAL = {
    "DPOTrainer": ("model", "ref_model", "args"),
    "KTOTrainer": ("model", "ref_model", "args", "train_dataset"),
    "GRPOTrainer": ("model", "reward_funcs", "args", "train_dataset"),
    "RLOOTrainer": ("model", "reward_funcs", "args", "train_dataset"),
    "OldRLOOTrainer": ("config", "processing_class", "policy", "ref_policy", "reward_model", "train_dataset"),
    "PPOTrainer": ("args", "processing_class", "model", "ref_model", "reward_model", "train_dataset", "value_model"),
    "OnlineDPOTrainer": ("model", "ref_model"),
}
"""Arguments of the trainers by their places; of others model and args."""
MODELS = ("model", "policy", "ref_model", "ref_policy", "reward_model", "value_model", "reward_funcs", "judge")
SERVER = (
    "vllm_mode", "vllm_server_base_url", "vllm_server_host", "vllm_server_port", "vllm_server_timeout",
    "vllm_enable_sleep_mode",
)  # fmt: skip
IMPORTANCE = (
    "vllm_importance_sampling_correction", "vllm_importance_sampling_mode", "vllm_importance_sampling_cap",
    "vllm_importance_sampling_clip_max", "vllm_importance_sampling_clip_min",
)  # fmt: skip


def trainers(script: Script) -> list[Call]:
    """The trainers of TRL that a script makes, but PPOTrainers of which it calls ``step``."""
    known = {one.name or name for name, one in peers()[PEER].trainers.items()}
    stepped = [one.owner for one in script.calls if one.name == ".step"]
    return [
        one for one in script.calls if one.name.startswith("trl") and one.short_name in known and one not in stepped
    ]


def table_name(trainer: Call) -> str:
    """The trainer's entry in the table: RLOOTrainer of before 0.22 has one of its own."""
    is_old = trainer.short_name == "RLOOTrainer" and bool({"policy", "reward_model", "config"} & set(trainer.kwargs))
    return "OldRLOOTrainer" if is_old else trainer.short_name


def read_origin(trainer: Call, script: Script) -> Origin:
    """What the script sets."""
    kind = table_name(trainer)
    table = peers()[PEER].settings(kind)
    arguments = dict(zip(POSITIONAL.get(kind, ("model", "args")), trainer.args, strict=False)) | trainer.kwargs
    own = peers()[PEER].trainers[kind].config
    found: dict[str, Any] = {}
    lines: dict[str, int] = {}
    sections = {*own, "arguments"}

    def take(values: Mapping[str, Any], among: tuple[str, ...], where: Mapping[str, int], line: int) -> None:
        for name, value in values.items():
            section = next((one for one in among if f"{one}.{name}" in table), among[0])
            found[f"{section}.{name}"], lines[f"{section}.{name}"] = value, where.get(name, line)

    config = arguments.pop("args", arguments.pop("config", None))
    if isinstance(config, Call):
        placed = {"output_dir" if place == 0 else f"argument {place + 1}": one for place, one in enumerate(config.args)}
        take(placed, own, {}, config.line)
        take(config.kwargs, own, config.lines, config.line)
    for one in script.calls:  # dataclasses that a parser fills, with the arguments of the command line
        if one.command_line is not None:
            among = own if one is config else (one.short_name,)
            if among != own and f"{one.short_name}." not in {f"{key.partition('.')[0]}." for key in table}:
                continue
            sections.add(one.short_name)
            taken = {name: value for name, value in one.command_line.items() if _is_known(table, among, name)}
            take(taken, among, {}, one.line)
            for name in taken:
                script.left_over.pop(name, None)
    lora = lora_config(arguments.get("model"), arguments.pop("peft_config", None))
    if isinstance(lora, Call) and lora.short_name == "LoraConfig":
        sections.add("LoraConfig")
        take(
            dict(zip(("task_type", "peft_type"), lora.args, strict=False)) | lora.kwargs,
            ("LoraConfig",),
            lora.lines,
            lora.line,
        )
        found["arguments.peft_config"], lines["arguments.peft_config"] = lora, lora.line
    bits = next((one for one in script.calls if one.short_name == "BitsAndBytesConfig"), None)
    if bits is not None:
        sections.add("BitsAndBytesConfig")
        take(bits.kwargs, ("BitsAndBytesConfig",), bits.lines, bits.line)
    take(
        {name: one for name, one in arguments.items() if one is not None},
        ("arguments", *own),
        trainer.lines,
        trainer.line,
    )
    return Origin(PEER, kind, found, lines, frozenset(sections))


def _is_known(table: Mapping[str, Any], among: tuple[str, ...], name: str) -> bool:
    return any(f"{section}.{name}" in table for section in among)


def translate_groups(run: Translation, script: Script, files: dict[str, str], output: Path) -> None:
    """Settings that several of the origin's make together, and the objects that the script makes."""
    run.claim(
        "arguments.peft_config",
        "arguments.quantization_config",
        "resume_from_checkpoint",
        "run_name",
        "log_completions",
    )
    for name in ("resume_from_checkpoint", "run_name", "log_completions"):
        if run.sets(name):
            run.add_row("none", name)
    _models(run, script, files, output)
    _data(run)
    _lora(run)
    common.dtype(run)
    _model_kwargs(run)
    common.trackers(run)
    common.several_processes(run)
    if run.command in ("grpo", "ppo", "online-dpo"):
        _rollouts(run)
    else:
        common.batches(run)
        common.saving(run)
        common.schedule(run, run.written.get("max_steps"))
    {"sft": _sft, "dpo": _dpo, "grpo": _grpo}.get(run.command, lambda _run: None)(run)


def _models(run: Translation, script: Script, files: dict[str, str], output: Path) -> None:
    paths = ("sft_model_path", "reward_model_path", "reward_model_name_or_path", "GRPOScriptArguments.reward_funcs")
    run.claim(*(f"arguments.{name}" for name in MODELS), *paths, "processing_class", "tokenizer", "data_collator")
    policy = next((name for name in ("arguments.model", "arguments.policy") if name in run.given), "arguments.model")
    named = model_name(run.value(policy))
    ours = run.write("model", named) if isinstance(named, str) else "model: ?"
    run.add_row("kept" if isinstance(named, str) else "question", policy, ours)
    for name in ("arguments.ref_model", "arguments.ref_policy"):
        if name in run.given:
            reference = model_name(run.value(name))
            is_same = reference == named or "create_reference_model" in source_text(run.value(name))
            known = isinstance(reference, str) or is_same
            mine = "" if is_same else run.write("reference", reference) if known else "reference: ?"
            run.add_row(
                "kept" if known else "question",
                name,
                mine or "reference: none",
                "The policy as it starts." if is_same else None,
            )
    if run.command in ("grpo", "ppo", "online-dpo"):
        _rewards(run, script, files, output)
    if run.command == "ppo":
        _critic(run)
    for name in paths:  # what the script loads from them is written above
        path = run.value(name)
        used = [ours for ours, value in run.written.items() if value in (path, [f"model:{path}"])]
        if run.sets(name) and used:
            run.add_row("kept", name, f"{used[0]}: {yaml_text(run.written[used[0]])}")
    for name in ("processing_class", "tokenizer"):
        if f"arguments.{name}" in run.given:
            run.add_row("none", f"arguments.{name}")
    collator = "arguments.data_collator"
    if collator in run.given:
        is_ours = "CompletionOnly" in source_text(run.value(collator))
        run.add_row("kept" if is_ours else "lost", collator, run.write("loss_on", "response") if is_ours else "")


def _rewards(run: Translation, script: Script, files: dict[str, str], output: Path) -> None:
    """Reward functions go into a file of their own: the script itself would train if it was imported."""
    key = next(
        (one for one in ("arguments.reward_funcs", "arguments.reward_model", "arguments.judge") if one in run.given), ""
    )
    value = run.value(key) if key else run.value("reward_model_path")
    rewards = value if isinstance(value, list | tuple) else [] if value is None else [value]
    functions = [one for one in rewards if isinstance(one, Function) and not one.name.startswith("a ")]
    library = [one for one in rewards if isinstance(one, Imported) and not reward_name(one)[0]]
    names: list[str] = []
    file = REWARDS if REWARDS not in files else f"rewards_{len(files)}.py"  # of another trainer of the script
    for one in rewards:
        if one in functions or one in library:
            names.append(f"python:{output / file}:{one.name.rpartition('.')[2]}")
        else:
            name, note = reward_name(one)
            names += [name] if name else []
            if note:
                fate = "differs" if name else "question"
                run.rows.append(Row(fate, f"reward {source_text(one)}", "", name, note, run.origin.lines.get(key)))  # type: ignore[arg-type]
    if functions or library:
        imports = "".join(
            f"from {one.name.rpartition('.')[0]} import {one.name.rpartition('.')[2]}\n" for one in library
        )
        files[file] = (
            imports
            + ("\n\n" if imports and functions else "")
            + (functions_file(script, functions) if functions else "")
        )
    if names:
        run.write("rewards", names)
        run.add_row("kept", key or "reward_model_path", f"rewards: {yaml_text(names)}")
    else:
        run.rows.append(Row("question", key or "the rewards", source_text(value) if key else "", "rewards: ?",
                            "python:FILE.py:FUNCTION, model:PATH or verify:math.", run.origin.lines.get(key)))  # fmt: skip


def _critic(run: Translation) -> None:
    value, reward = (model_name(run.value(f"arguments.{name}")) for name in ("value_model", "reward_model"))
    if "arguments.value_model" not in run.given:
        return
    if isinstance(value, str) and value == reward:
        run.add_row("kept", "arguments.value_model", run.write("critic", "reward"))
    elif isinstance(value, str):
        run.add_row("differs", "arguments.value_model", run.write("value_model", value))
    else:
        run.add_row("question", "arguments.value_model", "value_model: ?")


def _data(run: Translation) -> None:
    run.claim(
        "dataset_name", "dataset_train_split", "dataset_test_split", "arguments.train_dataset", "arguments.eval_dataset"
    )
    evaluates = str(run.value("eval_strategy")).rpartition(".")[2].lower() not in ("no", "none")
    for name, ours in (("arguments.train_dataset", "data"), ("arguments.eval_dataset", "eval_data")):
        if name not in run.given or (ours == "eval_data" and not evaluates and run.command != "ppo"):
            if name in run.given:
                run.add_row("none", name, note="eval_strategy is no, so nothing is evaluated.")
            continue
        place, note = data_name(run.value(name))
        run.add_row(
            "kept" if place else "question", name, run.write(ours, place) if place else f"{ours}: ?", note or None
        )
    for name in ("dataset_name", "dataset_train_split", "dataset_test_split"):
        if run.sets(name):
            is_known = "data" in run.written
            ours = f"data: {run.written['data']}" if is_known else ""
            run.add_row("kept" if is_known else "none", name, ours, None if is_known else "See train_dataset.")


def _lora(run: Translation) -> None:
    """Adapters, of a LoraConfig or of TRL's own settings."""
    mine = (
        "use_peft",
        "lora_r",
        "ModelConfig.lora_alpha",
        "ModelConfig.lora_dropout",
        "lora_target_modules",
        "ModelConfig.use_rslora",
    )
    theirs = (
        "LoraConfig.r",
        "LoraConfig.lora_alpha",
        "LoraConfig.lora_dropout",
        "LoraConfig.target_modules",
        "LoraConfig.use_rslora",
    )
    bits = ("ModelConfig.load_in_4bit", "BitsAndBytesConfig.load_in_4bit", "BitsAndBytesConfig.bnb_4bit_compute_dtype")
    run.claim(*mine, *theirs, *bits)
    is_own = "arguments.peft_config" in run.given
    if not is_own and run.value("use_peft") is not True:
        for name in mine:
            if run.sets(name):
                run.add_row("none", name, note="use_peft is not given, so every weight is trained.")
        return
    rank, alpha, dropout, targets, scaled = theirs if is_own else mine[1:]
    if run.ask_if_unknown(rank, alpha, ours="lora_rank"):
        return
    numbers = run.number(rank), run.number(alpha)
    if numbers[0] is not None and numbers[1] is not None:
        factor = numbers[0] ** 0.5 if run.value(scaled) is True else 1.0
        run.add_written_row(rank, run.write("lora_rank", int(numbers[0])))
        run.add_written_row(alpha, run.write("lora_alpha", numbers[1] * factor))
    wanted = run.value(targets)
    if wanted is None:
        run.add_row("question", targets, "lora_targets: ?")
    elif isinstance(wanted, str | list | tuple) and not run.ask_if_unknown(targets, ours="lora_targets"):
        run.add_written_row(
            targets, run.write("lora_targets", wanted if isinstance(wanted, str) else ",".join(map(str, wanted)))
        )
    if run.number(dropout):
        run.add_row("lost", dropout)
    if run.sets(scaled):
        run.add_row("kept", scaled)
    for name in bits[:2]:
        if run.value(name) is True:
            run.add_written_row(name, run.write("quantize", "4bit"))
    if bits[2] in run.given:
        run.add_row("none", bits[2])


def _model_kwargs(run: Translation) -> None:
    """The dtype of the weights."""
    names = ("model_init_kwargs", "ModelConfig.dtype", "ModelConfig.torch_dtype")
    run.claim(*names)
    for name in names:
        if not run.sets(name):
            continue
        value = run.value(name)
        kind = (value.get("dtype", value.get("torch_dtype")) if isinstance(value, dict) else value) or ""
        kind = (kind.name if isinstance(kind, Imported) else str(kind)).rpartition(".")[2]
        if "lora_rank" in run.written:
            run.add_row("none", name, note="heedful trains adapters in float32; --dtype is that of the products.")
        elif kind in ("bfloat16", "float16"):
            run.add_row("differs", name, run.write("weights_dtype", "bfloat16") if kind == "bfloat16" else "")
        else:
            run.add_row("none", name)


def _rollouts(run: Translation) -> None:
    """Batches of trainers that sample: heedful's steps are rollout batches, and its sizes count responses of all devices."""
    rows = common.optimizer_rows(run)
    sizes = (
        "generation_batch_size",
        "steps_per_generation",
        "num_mini_batches",
        "total_episodes",
        "num_train_epochs",
        "max_steps",
    )
    run.claim(*sizes)
    if rows is None or run.ask_if_unknown(*sizes[:3], ours="rollout_batch_size"):
        return
    each, accumulated = (
        int(run.number("per_device_train_batch_size") or 1),
        run.number("gradient_accumulation_steps") or 1,
    )
    per_prompt = 2 if run.command == "online-dpo" else 1
    minibatch = rows * per_prompt
    parts = 1.0
    if run.trainer in ("GRPOTrainer", "RLOOTrainer"):
        whole, slices = run.number("generation_batch_size"), run.number("steps_per_generation")
        slices = slices if slices is not None else run.number("num_mini_batches")
        parts = whole / rows if whole else slices / accumulated if slices else 1.0
    elif run.trainer in ("PPOTrainer", "OldRLOOTrainer"):
        parts = run.number("num_mini_batches") or 1
    rollout = round(minibatch * parts)
    run.add_written_row("per_device_train_batch_size", run.write("micro_batch_size", each * per_prompt))
    run.add_written_row("gradient_accumulation_steps", run.write("minibatch_size", min(minibatch, rollout)))
    source = next((name for name in sizes[:3] if run.sets(name)), sizes[0])
    run.add_written_row(source, run.write("rollout_batch_size", rollout))
    updates = max(1, round(rollout / minibatch))
    _steps(run, rollout, updates)
    common.saving(run, steps_are_updates=False)
    by_update = run.trainer in ("GRPOTrainer", "RLOOTrainer")  # PPO's scheduler steps once per rollout batch
    common.schedule(
        run,
        run.written.get("steps"),
        updates=round(updates * (run.number("num_iterations") or 1)) if by_update else 1,
    )


def _steps(run: Translation, rollout: int, updates: int) -> None:
    if run.ask_if_unknown("max_steps", "total_episodes", "num_train_epochs", ours="steps"):
        return
    most, episodes = run.number("max_steps"), run.number("total_episodes")
    passes = run.number("num_iterations") or 1
    if most is not None and most > 0:
        run.add_written_row(
            "max_steps", run.write("steps", max(1, round(most / (updates * passes)))), differs=updates * passes > 1
        )
    elif episodes:
        run.add_written_row("total_episodes", run.write("steps", -(-int(episodes) // rollout)))
    else:
        run.add_row(
            "question",
            "num_train_epochs",
            "steps: ?",
            f"{run.number('num_train_epochs'):g} times all responses, over {rollout}.",
        )


def _sft(run: Translation) -> None:
    on, assistant, field, more = "completion_only_loss", "assistant_only_loss", "dataset_text_field", "dataset_kwargs"
    run.claim(on, assistant, field, more)
    if run.value(assistant) is True:
        run.add_written_row(assistant, run.write("loss_on", "response"))
    elif isinstance(run.value(on), bool):
        run.add_written_row(on, run.write("loss_on", "response" if run.value(on) else "all"))
    else:
        run.add_row("question", on, "loss_on: ?")
    name = run.value(field)
    if isinstance(name, str) and name != "text" and run.sets(field):
        run.add_written_row(field, run.write("columns", f"text={name}"))
    if run.sets(more):
        run.add_row("question", more)


def _dpo(run: Translation) -> None:
    if run.trainer == "CPOTrainer":
        run.claim("simpo_gamma")
        gamma, beta = run.number("simpo_gamma"), run.number("beta")
        if run.value("loss_type") == "simpo" and gamma is not None and beta:
            run.add_written_row("simpo_gamma", run.write("target_margin", gamma / beta))
        return
    if run.trainer != "DPOTrainer":
        return
    run.claim("loss_type", "loss_weights", "label_smoothing", "tools")
    kinds, weights = run.value("loss_type"), run.value("loss_weights")
    kinds = list(kinds) if isinstance(kinds, list | tuple) else [kinds]
    table = run.table[run.full_name("loss_type")].values
    first = next((one for one in kinds if one in table), None)
    others = [one for one in kinds if one not in (first, "sft")]
    if first is None or others:
        run.add_row("lost", "loss_type")
    else:
        run.add_written_row("loss_type", run.write("loss", table[first]))
        if first == "sigmoid_norm":
            run.write("length_normalise", True)
        if "sft" in kinds:
            share = (
                weights[kinds.index("sft")] / weights[kinds.index(first)] if isinstance(weights, list | tuple) else 1.0
            )
            run.add_written_row("loss_weights", run.write("nll_coef", share))
    smoothing = run.number("label_smoothing")
    if smoothing:
        acts = first == "robust" or (first == "sigmoid" and run.version in [f"0.{one}" for one in range(12, 29)])
        run.add_row(
            "kept" if acts else "none", "label_smoothing", run.write("label_smoothing", smoothing) if acts else ""
        )


def _grpo(run: Translation) -> None:
    _vllm(run)
    if run.trainer != "GRPOTrainer":
        run.claim("reward_clip_range", "chat_template_kwargs", "max_prompt_length")
        return
    run.claim(
        "loss_type",
        "epsilon_high",
        "max_prompt_length",
        "use_adaptive_entropy",
        "entropy_target",
        "chat_template_kwargs",
    )
    run.claim("max_tool_calling_iterations")
    kind = run.value("loss_type")
    table = run.table[run.full_name("loss_type")].values
    if not run.ask_if_unknown("loss_type", ours="loss_reduction"):
        if kind in table:
            run.add_written_row("loss_type", run.write("loss_reduction", table[kind]), differs=kind == "bnpo")
            if kind == "cispo":
                run.write("policy_loss", "cispo")
        else:
            run.add_row("lost", "loss_type")
    high = run.number("epsilon_high")
    if high is not None:
        run.add_written_row("epsilon_high", run.write("clip_range_high", high - 1 if kind == "cispo" else high))
    longest = run.number("max_prompt_length")
    if longest is not None:
        run.write("too_long", "truncate")
        run.add_written_row("max_prompt_length", run.write("max_prompt_tokens", int(longest)), differs=True)
    if run.value("use_adaptive_entropy") is True:
        run.add_written_row("entropy_target", run.write("target_entropy", run.number("entropy_target")), differs=True)
    turns = run.number("max_tool_calling_iterations")
    if turns is not None and run.sets("max_tool_calling_iterations"):
        run.add_row("kept", "max_tool_calling_iterations", run.write("max_turns", int(turns) + 1))
    if isinstance(run.value("chat_template_kwargs"), dict):
        run.add_row("question", "chat_template_kwargs", "chat_template_kwargs: ?")
    for name, ours in (("tools", "environment"), ("environment_factory", "environment"), ("rollout_func", "sampler")):
        if run.claim(f"arguments.{name}"):
            run.add_row("question", f"arguments.{name}", f"{ours}: ?")


def _vllm(run: Translation) -> None:
    """Sampling by a server, and the correction for it."""
    run.claim("use_vllm", *SERVER, *IMPORTANCE)
    if run.value("use_vllm") is not True:
        for name in (*SERVER, *IMPORTANCE):
            if run.sets(name):
                run.add_row("none", name, note="use_vllm is not set, so it does nothing.")
        return
    address, host, port = (run.value(name) for name in SERVER[1:4])
    place = address if isinstance(address, str) else f"http://{host}:{port}".replace("0.0.0.0", "127.0.0.1")
    run.add_row("differs", "use_vllm", run.write("sampler", [f"vllm:{place}"]))
    for name in SERVER:
        if run.sets(name):
            run.add_row("differs", name)
    if run.value(IMPORTANCE[0]) is not True:
        return
    modes = run.table[run.full_name(IMPORTANCE[1])].values if run.full_name(IMPORTANCE[1]) in run.table else {}
    mode = str(modes.get(str(run.value(IMPORTANCE[1])), "token-truncate"))
    run.add_written_row(IMPORTANCE[1], run.write("importance", mode), differs=True)
    cap = run.number(IMPORTANCE[3]) or run.number(IMPORTANCE[2])
    if cap:
        run.add_written_row(IMPORTANCE[3], run.write("importance_high", cap))
    low = run.number(IMPORTANCE[4])
    if low is not None and mode.endswith("mask"):
        run.add_written_row(IMPORTANCE[4], run.write("importance_low", low))
