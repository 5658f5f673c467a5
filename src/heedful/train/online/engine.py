"""The online engine: a policy learns from rewards of its own responses.

PPO (Schulman et al. 2017; Ouyang et al. 2022), A2C (Mnih et al. 2016), GRPO (Shao et al. 2024) and by settings RLOO (Ahmadian
et al. 2024), Dr. GRPO (Liu et al. 2025), DAPO (Yu et al. 2025), GSPO (Zheng et al. 2025)
and REINFORCE (Williams 1992) are the same loop. What differs is chosen from two tables: advantages
(`heedful.train.online.advantages`) and surrogates (`heedful.core.surrogates`).
"""

from collections.abc import Sequence
from typing import Any

from heedful.configs.online import GRPOConfig, OnlineConfig, PPOConfig
from heedful.rewards import Reward, RewardFunction
from heedful.train.online.evaluation import evaluate, sample_rows
from heedful.train.online.experience import collect
from heedful.train.online.metrics import SHOWN, note_of
from heedful.train.online.rollout_files import forget_rollouts, write_rollouts
from heedful.train.online.start import start
from heedful.train.online.update import learn
from heedful.train.run import Run


def train_online(config: OnlineConfig, rewards: Sequence[str | Reward | RewardFunction] = ()) -> dict[str, Any]:
    """Optimise a policy against rewards and write a run folder. Returns what summary.json holds.

    Args:
        config: the settings; their class is the preset.
        rewards: added to the config's: functions, `Reward` objects or strings.

    Raises ConfigError, DataError, CheckpointError before anything is written; RewardError, TrainingError during training.
    """
    config, learner, held_out, about = start(config, rewards)
    with Run(
        config,
        learner,
        config.algorithm,
        config.steps,
        objective=config.best_metric,
        higher_is_better=True,
        shown=SHOWN,
        can_evaluate=bool(held_out),
        **about,
    ) as run:
        forget_rollouts(config, after=run.done)
        for step in run.steps():
            if run.needs_update(step):
                experience = collect(learner, next(learner.prompts))
                with run.update():
                    metrics = learn(learner, experience)
                    write_rollouts(config, step, experience.scored)
                    run.log(step, metrics, note=note_of(metrics, config.samples_per_prompt, experience.problem))
                    if run.samples_due(step):
                        run.show_samples(step, sample_rows(experience.scored, config))
                    learner.check(metrics)
            if run.evaluation_due(step):
                run.evaluate(step, evaluate(learner, held_out))
        run.summary["score_norm"] = learner.score_norm.state_dict()
    return run.summary


def train_ppo(config: PPOConfig, rewards: Sequence[str | Reward | RewardFunction] = ()) -> dict[str, Any]:
    """PPO, or A2C if given an `A2CConfig`: `train_online` under the name that people look for."""
    return train_online(config, rewards)


def train_grpo(config: GRPOConfig, rewards: Sequence[str | Reward | RewardFunction] = ()) -> dict[str, Any]:
    """GRPO and its relatives: `train_online` under the name that people look for."""
    return train_online(config, rewards)
