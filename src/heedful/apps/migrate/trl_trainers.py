"""Scripts that use a trainer of TRL from 0.12 on, and its SFT, DPO and reward trainers before."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from heedful.apps.migrate import common
from heedful.apps.migrate.objects import (
    data_name,
    functions_file,
    loading,
    lora_config,
    model_name,
    own_module,
    reward_name,
)
from heedful.apps.migrate.script import SAME, Script
from heedful.apps.migrate.translate import Fate, Origin, Row, Translation, yaml_text
from heedful.apps.migrate.values import Call, Function, Imported, certainly_equal, is_unknown, source_text
from heedful.configs.peers import peers, version_key

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
    known = {one.name or name for name, one in peers()[PEER].trainers.items()} | {"PPOv2Trainer"}
    stepped = [one.owner for one in script.calls if one.name == ".step"]
    return [
        one for one in script.calls if one.name.startswith("trl") and one.short_name in known and one not in stepped
    ]


def table_name(trainer: Call) -> str:
    """The trainer's entry in the table: RLOOTrainer of before 0.22 has one of its own."""
    is_old = trainer.short_name == "RLOOTrainer" and bool({"policy", "reward_model", "config"} & set(trainer.kwargs))
    return "OldRLOOTrainer" if is_old else trainer.short_name.replace("PPOv2", "PPO")


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
            take({name: value for name, value in taken.items() if name not in one.kwargs}, among, {}, one.line)
            for name in taken:
                script.left_over.pop(name, None)
    lora = lora_config(arguments.get("model"), arguments.pop("peft_config", None))
    if isinstance(lora, Call) and lora.short_name in ("LoraConfig", "get_peft_model"):
        sections.add("LoraConfig")
        placed = (
            dict(zip(("task_type", "peft_type"), lora.args, strict=False)) if lora.short_name == "LoraConfig" else {}
        )
        given = {name: value for name, value in lora.kwargs.items() if name != "model"}
        take(placed | given, ("LoraConfig",), lora.lines, lora.line)
        found["arguments.peft_config"], lines["arguments.peft_config"] = lora, lora.line
    elif lora is not None and not (isinstance(lora, Call) and lora.short_name == "get_peft_config"):
        found["arguments.peft_config"], lines["arguments.peft_config"] = lora, trainer.line
    call = loading(arguments.get("model", arguments.get("policy")))
    kwargs = found.get(next((name for name in found if name.endswith(".model_init_kwargs")), ""))
    sections.add("model")
    for made in ({} if call is None else call.kwargs, kwargs if isinstance(kwargs, dict) else {}):
        where, line = ({}, trainer.line) if call is None else (call.lines, call.line)
        take({name: one for name, one in made.items() if one is not None}, ("model",), where, line)
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
    is_general = isinstance(config, Call) and config.short_name == "TrainingArguments"
    is_old = trainer.short_name == "PPOv2Trainer" or any(f"{one}.{name}" in found for one in own for name in arguments)
    shown_version = "0.12" if is_old else ""  # later trainers do not take settings themselves
    first = "TrainingArguments" if is_general else ""
    return Origin(PEER, kind, found, lines, frozenset(sections), first, shown_version)


def _is_known(table: Mapping[str, Any], among: tuple[str, ...], name: str) -> bool:
    return any(f"{section}.{name}" in table for section in among)


def translate_groups(run: Translation, trainer: Call, script: Script, files: dict[str, str], output: Path) -> None:
    """Settings that several of the origin's make together, and the objects that the script makes."""
    common.subclass(run, trainer)
    template = next((one for one in script.calls if one.short_name in SAME), None)
    if template is not None:
        said = "The tokenizer gets this chat template. Here: chat_template names one, if the tokenizer has none."
        run.rows.append(Row("differs", template.short_name, template.text, "", said, template.line))
    unused = ("resume_from_checkpoint", "run_name", "log_completions")
    run.claim("arguments.quantization_config", *unused)
    for name in unused:
        if run.sets(name):
            run.add_row("none", name)
    if "arguments.quantization_config" in run.given:
        run.add_row("none", "arguments.quantization_config", note="See BitsAndBytesConfig.")
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
        order = "train_sampling_strategy"
        if run.value(order) == "sequential" and run.claim(order):
            run.add_row("kept", order, run.write("shuffle", False) if "shuffle" in run.setting_types else "")
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
            is_same = certainly_equal(reference, named) or "create_reference_model" in source_text(run.value(name))
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
    library = [
        one for one in rewards if isinstance(one, Imported) and not reward_name(one)[0] and not own_module(script, one)
    ]
    line = run.origin.lines.get(key)
    names: list[str] = []
    is_whole = True
    file = REWARDS if REWARDS not in files else f"rewards_{len(files)}.py"  # of another trainer of the script
    for one in rewards:
        if one in functions or one in library:
            names.append(f"python:{output / file}:{one.name.rpartition('.')[2]}")
        elif isinstance(one, Imported) and own_module(script, one):
            names.append(f"python:{own_module(script, one)}:{one.short_name}")
        else:
            name, note = reward_name(one)
            if name == "verify:math":
                run.write("columns", "answer=solution")
            names += [name] if name else []
            is_whole = is_whole and bool(name)
            if note:
                fate: Fate = "differs" if name else "question"
                run.rows.append(Row(fate, f"reward {source_text(one):.100}", "", name or "rewards: ?", note, line))
    if functions or library:
        imports = "".join(f"from {one.name.rpartition('.')[0]} import {one.short_name}\n" for one in library)
        copied, missing = functions_file(script, functions) if functions else ("", [])
        if any(one.name.startswith("trl.") for one in library):
            said = "It is TRL's, which heedful does not need: install trl too, or write the function into the file."
            run.rows.append(Row("question", file, imports.strip(), "", said, line))
        files[file] = imports + ("\n\n" if imports and functions else "") + copied
        if missing:
            read = ", ".join(missing)
            said = f"The functions read {read}, which the script makes as it runs: give them values in the file."
            run.rows.append(Row("question", file, read, "", said, line))
    said = "python:FILE.py:FUNCTION, model:PATH or verify:math."
    if names and is_whole:
        run.write("rewards", names)
        run.add_row("kept", key or "reward_model_path", f"rewards: {yaml_text(names)}")
    elif names:
        run.add_row("question", key, "rewards: ?", f"Besides those of the rows above: {yaml_text(names)}.")
    else:
        row = Row("question", key or "the rewards", source_text(value) if key else "", "rewards: ?", said, line)
        run.rows.append(row)


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
    old = "TrainingArguments.evaluation_strategy"
    evaluates = common.strategy_of(run, old if old in run.given else "eval_strategy") not in ("no", "none")
    for name, ours in (("arguments.train_dataset", "data"), ("arguments.eval_dataset", "eval_data")):
        if name not in run.given or (ours == "eval_data" and not evaluates and run.command != "ppo"):
            if name in run.given:
                run.add_row("none", name, note="eval_strategy is no, so nothing is evaluated.")
            continue
        place, note = data_name(run.value(name))
        if run.trainer in ("PPOTrainer", "OldRLOOTrainer") and not place:
            note = 'TRL reads token ids here, and heedful texts: a file with {"prompt": TEXT or messages} a line.' + (
                f" As loaded the records are {note.rpartition('As loaded they are ')[2]}" if "As loaded" in note else ""
            )
        run.add_row(
            "kept" if place else "question", name, run.write(ours, place) if place else f"{ours}: ?", note or None
        )
    for name in ("dataset_name", "dataset_train_split", "dataset_test_split"):
        if run.sets(name):
            is_known = "data" in run.written
            ours = f"data: {run.written['data']}" if is_known else ""
            run.add_row("kept" if is_known else "none", name, ours, None if is_known else "See train_dataset.")


OWN = ("lora_r", "ModelConfig.lora_alpha", "ModelConfig.lora_dropout", "lora_target_modules", "ModelConfig.use_rslora")
PEFT = (
    "LoraConfig.r", "LoraConfig.lora_alpha", "LoraConfig.lora_dropout", "LoraConfig.target_modules", "LoraConfig.use_rslora",
)  # fmt: skip
"""TRL's settings of adapters, and PEFT's."""


def _lora(run: Translation) -> None:
    """Adapters, of a LoraConfig or of TRL's own settings."""
    flag, bits = "arguments.peft_config", ("ModelConfig.load_in_4bit", "BitsAndBytesConfig.load_in_4bit")
    dtype = "BitsAndBytesConfig.bnb_4bit_compute_dtype"
    run.claim("use_peft", *OWN, *PEFT, *bits, flag, dtype)
    if dtype in run.given:
        run.add_row("none", dtype)
    is_peft = flag in run.given
    if is_peft and not isinstance(run.value(flag), Call):
        run.add_row("question", flag, "lora_rank: ?", "Only a run can tell whether there are adapters, and which.")
    elif is_peft or run.value("use_peft") is True:
        if is_peft:
            run.add_row("kept", flag, "", "See LoraConfig.")
        _adapters(run, PEFT if is_peft else OWN)
        for name in bits:
            if run.value(name) is True:
                run.add_written_row(name, run.write("quantize", "4bit"))
    else:
        for name in ("use_peft", *OWN):
            if run.full_name(name) in run.given:
                run.add_row("none", name, note="use_peft is not given, so every weight is trained.")


def _adapters(run: Translation, names: Sequence[str]) -> None:
    rank, alpha, dropout, targets, scaled = names
    if run.full_name("use_peft") in run.given and rank in OWN:
        run.add_row("kept", "use_peft", "", "See lora_r.")
    numbers = run.number(rank), run.number(alpha)
    if not run.ask_if_unknown(rank, alpha, ours="lora_rank") and numbers[0] is not None and numbers[1] is not None:
        factor = numbers[0] ** 0.5 if run.value(scaled) is True else 1.0
        run.add_written_row(rank, run.write("lora_rank", int(numbers[0])))
        run.add_written_row(alpha, run.write("lora_alpha", numbers[1] * factor))
    wanted = run.value(targets)
    if wanted is None:
        run.add_row("question", targets, "lora_targets: ?")
    elif not run.ask_if_unknown(targets, ours="lora_targets"):
        whole = wanted if isinstance(wanted, str) else ",".join(map(str, wanted))
        run.add_written_row(targets, run.write("lora_targets", whole))
    share = run.number(dropout)
    if not run.ask_if_unknown(dropout, ours="lora_dropout") and share and "lora_dropout" in run.setting_types:
        run.add_written_row(dropout, run.write("lora_dropout", share))
    elif share:
        run.add_row("lost" if run.command == "grpo" else "none", dropout)
    if run.full_name(scaled) in run.given:
        run.add_row("kept", scaled)


def _model_kwargs(run: Translation) -> None:
    """The dtype of the weights."""
    names = ("model.dtype", "model.torch_dtype", "ModelConfig.dtype", "ModelConfig.torch_dtype")
    bits, whole = "model.load_in_4bit", "model_init_kwargs"
    run.claim(*names, bits, whole)
    if run.value(bits) is True:
        run.add_row("kept" if "lora_rank" in run.written else "lost", bits,
                run.write("quantize", "4bit") if "lora_rank" in run.written else "")  # fmt: skip
    if run.full_name(whole) in run.given:
        is_read = isinstance(run.value(whole), dict)
        run.add_row("none" if is_read else "question", whole, note="See the rows of model." if is_read else None)
    for name in names:
        if run.full_name(name) not in run.given or run.ask_if_unknown(name, ours="weights_dtype"):
            continue
        value = run.value(name)
        kind = (value.name if isinstance(value, Imported) else str(value or "")).rpartition(".")[2]
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
    if run.ask_if_unknown(*sizes[:3], ours="rollout_batch_size") or rows is None:
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
    elif run.trainer == "OldRLOOTrainer" or (run.trainer == "PPOTrainer" and version_key(run.version) < (0, 17)):
        parts = run.number("num_mini_batches") or 1
    rollout = max(1, round(minibatch * parts))
    run.add_written_row("per_device_train_batch_size", run.write("micro_batch_size", each * per_prompt))
    run.add_written_row("gradient_accumulation_steps", run.write("minibatch_size", min(minibatch, rollout)))
    source = next((name for name in sizes[:3] if run.sets(name)), sizes[0])
    run.add_written_row(source, run.write("rollout_batch_size", rollout))
    samples = run.number("num_generations") or 1 if run.trainer in ("GRPOTrainer", "RLOOTrainer") else per_prompt
    updates = max(1, round(rollout / minibatch)) * (run.number("num_iterations") or 1)
    counts_batches = run.trainer in ("PPOTrainer", "OldRLOOTrainer")
    if counts_batches:
        _ends(run)
    _steps(run, rollout, samples, updates)
    common.saving(run, 1 if counts_batches else updates)
    by_update = run.trainer in ("GRPOTrainer", "RLOOTrainer")  # PPO's scheduler steps once per rollout batch
    common.schedule(run, run.written.get("steps"), updates=round(updates) if by_update else 1)


def _ends(run: Translation) -> None:
    """Whether a response ends at EOS: it does not there, unless the script says so."""
    names = ("stop_token", "stop_token_id")
    run.claim(*names, "num_sample_generations")
    if run.full_name("num_sample_generations") in run.given:
        run.add_row("none", "num_sample_generations")
    if run.ask_if_unknown(*names, ours="response_length"):
        return
    word, number = (run.value(name) for name in names)
    if word == "eos":
        run.add_row("kept", names[0], run.write("response_length", "stop"))
    elif number is not None:
        run.add_row("question", names[1], "response_length: ?")
    else:
        run.add_row(
            "kept" if run.full_name(names[0]) in run.given else "default",
            names[0],
            run.write("response_length", "fixed"),
        )


def _steps(run: Translation, rollout: int, samples: float, updates: float) -> None:
    """Rollout batches, of ``samples`` responses to each prompt and with ``updates`` optimizer steps each."""
    if run.ask_if_unknown("max_steps", "total_episodes", "num_train_epochs", ours="steps"):
        return
    most, episodes = run.number("max_steps"), run.number("total_episodes")
    if run.trainer in ("PPOTrainer", "OldRLOOTrainer"):
        most = None
        if run.full_name("max_steps") in run.given:
            run.add_row("none", "max_steps", note="This trainer does not read it: its epochs or episodes end the run.")
    if most is not None and most > 0:
        run.add_written_row("max_steps", run.write("steps", max(1, round(most / updates))), differs=updates > 1)
    elif episodes:
        run.add_written_row("total_episodes", run.write("steps", -(-int(episodes) // rollout)))
    else:
        run.add_row(
            "question",
            "num_train_epochs",
            "steps: ?",
            f"{run.number('num_train_epochs'):g} times the number of prompts, over {rollout / samples:g}, the prompts of a "
            "rollout batch.",
        )


def _sft(run: Translation) -> None:
    on, assistant, field, more = "completion_only_loss", "assistant_only_loss", "dataset_text_field", "dataset_kwargs"
    run.claim(on, assistant, field, more)
    if run.value(assistant) is True:
        run.add_written_row(assistant, run.write("loss_on", "response"))
    elif isinstance(run.value(on), bool):
        run.add_written_row(on, run.write("loss_on", "response" if run.value(on) else "all"))
    elif run.full_name(field) not in run.given:
        run.add_row("question", on, "loss_on: ?")
    name = run.value(field)
    if run.full_name(field) in run.given and not run.ask_if_unknown(field, ours="columns"):
        is_text = name in ("text", "", None)
        run.add_row("kept", field, "" if is_text else run.write("columns", f"text={name}"), "" if is_text else None)
    if run.full_name(more) in run.given:
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
    if run.ask_if_unknown("loss_type", "loss_weights", ours="loss"):
        return
    kinds, weights = run.value("loss_type"), run.value("loss_weights")
    kinds = [str(one) for one in (kinds if isinstance(kinds, list | tuple) else [kinds])]
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
            both = (
                (weights[kinds.index("sft")], weights[kinds.index(first)])
                if isinstance(weights, list | tuple) and len(weights) == len(kinds)
                else (1.0, 1.0)
            )
            if all(isinstance(one, int | float) for one in both) and both[1]:
                run.add_written_row("loss_weights", run.write("nll_coef", both[0] / both[1]))
            else:
                run.add_row("question", "loss_weights", "nll_coef: ?")
    smoothing = run.number("label_smoothing")
    if smoothing:
        acts = first == "robust" or (first == "sigmoid" and run.version in [f"0.{one}" for one in range(12, 29)])
        run.add_row(
            "kept" if acts else "none", "label_smoothing", run.write("label_smoothing", smoothing) if acts else ""
        )


def _grpo(run: Translation) -> None:
    _vllm(run)
    if run.trainer != "GRPOTrainer":
        run.claim("reward_clip_range")
        _prompts(run)
        return
    run.claim(
        "loss_type",
        "epsilon_high",
        "use_adaptive_entropy",
        "entropy_target",
    )
    _prompts(run)
    run.claim("max_tool_calling_iterations")
    kind = str(run.value("loss_type"))
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
    if run.value("use_adaptive_entropy") is True:
        run.add_written_row("entropy_target", run.write("target_entropy", run.number("entropy_target")), differs=True)
    turns = run.number("max_tool_calling_iterations")
    if turns is not None and run.sets("max_tool_calling_iterations"):
        run.add_row("kept", "max_tool_calling_iterations", run.write("max_turns", int(turns) + 1))
    for name, ours in (("tools", "environment"), ("environment_factory", "environment"), ("rollout_func", "sampler")):
        if run.claim(f"arguments.{name}"):
            run.add_row("question", f"arguments.{name}", f"{ours}: ?")


def _prompts(run: Translation) -> None:
    """The prompts' length, and what their template is given."""
    variables = run.value("chat_template_kwargs")
    run.claim("max_prompt_length", "chat_template_kwargs")
    longest = run.number("max_prompt_length")
    if not run.ask_if_unknown("max_prompt_length", ours="max_prompt_tokens") and longest is not None:
        run.write("too_long", "truncate")
        run.add_written_row("max_prompt_length", run.write("max_prompt_tokens", int(longest)), differs=True)
    elif run.full_name("max_prompt_length") in run.given and run.value("max_prompt_length") is None:
        run.add_row("none", "max_prompt_length", note="Without it prompts are whole, as in heedful.")
    if run.full_name("chat_template_kwargs") in run.given and variables is not None:
        if isinstance(variables, dict) and not is_unknown(list(variables.values())):
            run.add_row("kept", "chat_template_kwargs", run.write("chat_template_kwargs", json.dumps(variables)), "")
        else:
            run.add_row("question", "chat_template_kwargs", "chat_template_kwargs: ?")


def _vllm(run: Translation) -> None:
    """Sampling by a server, and the correction for it."""
    run.claim("use_vllm", *SERVER, *IMPORTANCE)
    if run.value("use_vllm") is not True:
        for name in (*SERVER, *IMPORTANCE):
            if run.sets(name):
                run.add_row("none", name, note="use_vllm is not set, so it does nothing.")
        return
    if run.value(SERVER[0]) == "colocate":
        said = (
            "There vLLM samples in the trainer's process; here the trainer samples itself, or with sampler vllm:URL a"
        )
        run.add_row("differs", "use_vllm", "", f"{said} server (heedful serve-policy MODEL).")
        for name in (*SERVER, *IMPORTANCE):
            if run.full_name(name) in run.given:
                run.add_row("none", name, note="Without a server heedful's log-probs are those that it samples from.")
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
