"""The numbers at which something is worth a word: one table for the doctor, for alarms and for the healthy bands of curves.

A share is of 1, nats are per token unless they say otherwise, and "in each of N steps" means N steps in a row.
docs/clinic.md measures how often alarms with these numbers are right.
"""

# Responses ---------------------------------------------------------------------------------------------------------------

CUT = 0.1
"""Share of the responses that are cut at their limit, above which a run warns and a curve leaves its healthy band."""
CUT_AT_START = 0.5
"""The same before the first step: above it, most of what is scored are beginnings. A policy learns to end within a run, so a
share between both is none of the doctor's business."""
FEW_ENDS = 0.5
"""Below this share of learned responses with an end, most of what the policy learns does not end. Above it, ending is what it
learns to do most often."""
MANY_STOPS = 0.05
"""Above this share of responses that sampling would cut short, a policy that imitates them is cut noticeably often."""
ENDS_LOST, ENDS_STEPS = 0.3, 3
"""Drop in the share of responses, or of episodes, that end by themselves, against the first steps, for this many steps."""
DRIFT, DRIFT_STEPS, DRIFT_TOKENS = 2.0, 5, 5.0
"""Factor by which responses are longer or shorter than in the first steps, number of steps, least difference in tokens."""
LOOPS, LOOPS_MORE, LOOPS_STEPS = 0.3, 0.2, 5
"""Share of 4-grams that repeat, its rise since the first steps, for this many steps."""
OBSERVED = 0.9
"""Share of the tokens behind prompts that an environment says, above which nine tokens are read for each that is learned."""
CALLS_FAIL = 0.5
"""Share of the calls of tools that fail, above which a policy reads errors more often than results."""
REPLAYED = 16
"""Episodes of each environment that the doctor plays again. One that differs by chance in a tenth of them differs in at least
one of these with 81 %."""

# Data --------------------------------------------------------------------------------------------------------------------

MANY_EQUAL = 0.05
"""Above this share, equal pairs are no accident of two people writing the same (7 % in OpenRLHF#1311, all from cutting)."""
MANY_CUT_RECORDS = 0.1
"""The share of records that --max-dropped allows to be dropped; cut records count here too."""
MANY_SHARED = 0.01
"""Of the held-out prompts. Below it, numbers move by less than a hundredth, whatever was learned by heart."""
MOSTLY_ONE = 0.9
"""Share of the records with one and the same answer, above which most of what is learned is that answer."""
CONTRADICTED, MOSTLY_CONTRADICTED = 0.2, 0.9
"""Share of the preferences whose opposite is among the data too. People disagree about a fifth of pairs that are hard; at
nine tenths nothing is left to learn."""
REPEATED = 0.5
"""Share of the records that repeat another: above it, an epoch is two or more."""
UNKNOWN, MOSTLY_UNKNOWN = 0.1, 0.5
"""Share of tokens that stand for characters which the tokenizer does not know."""
REPEATS, REPEATED_BYTES = 0.5, 16
"""Share of the answers that begin with their question, or stand in it, above which the column was filled so. Texts of fewer
bytes, such as a greeting or a choice, are passed over."""
GIVEN_AWAY = 0.9
"""So much more of the chosen responses than of the rejected ones begin, or end, with the same character or word: nine tenths
of the pairs can then be told apart without reading them."""
MARKED = 0.5
"""Share of the records with marks of a chat template in their texts, above which one has rendered them. Fewer may speak of
one."""
REFUSALS, TOLD_APART = 0.1, 0.65
"""Share of the answers that refuse, from which on a model refuses often; and the probability that the words of a refused
question are told from those of an answered one, below which nothing tells them apart. With 32 refusals or more it was 0.36 to
0.66 (median 0.5) where a quarter of four data sets was refused by chance, and 0.71 or more in a safety data set."""
ENDED, NOT_ENDED = 0.5, 0.25
"""Share of shorter answers that end with a mark, such as a full stop, and of the longest ones: at least and at most so many,
where all of the longest are equally long. Poems, code and numbers have no full stop at any length."""
BALANCED, UNBALANCED = (1.0, 1.5), 2.0
"""Range of (weight x number of good responses) / (weight x number of bad ones) that KTO's paper recommends (eq. 9): outside
it a run says so. The doctor warns at so many times outside it: held-out records alone move it by hundredths."""
LOOKED_AT = 4
"""Conversations that are rendered with one turn changed, besides the longest: a template renders all of them alike."""

# Models and settings -----------------------------------------------------------------------------------------------------

NEAR_THE_MEAN = 0.01
"""A row of embeddings that is closer to the mean of all rows than this times what is usual was put there by transformers'
resize_token_embeddings, which draws new rows at about 1e-5 of the usual distance."""
MEASURED_RATE = {"imitation": 0.48, "reference": 0.23}
"""The highest learning rate of all weights, times the model's hidden size, of the recipes that were measured: SFT of the demo
(5e-3 * 96), PPO on numbers (3e-4 * 768). Rates that are stable fall about as 1 / width (Yang et al. 2022, muP). Learning
from a policy's own responses, or against a reference, wants less than SFT."""
ABOVE_MEASURED = 2.0
"""A rate that is higher than this times the highest that was measured is remarked on."""
SLOW_ADAPTERS = 2.0
"""Adapters whose rate is at most this times the trainer's default for all weights have probably been given that rate."""
FLOAT32_STEP = 2.0**-24
"""Half the distance of neighbouring float32 numbers, as a share of their size: a smaller change is rounded away."""
VALUE_MOVES = 1e-6
"""A value head that moves by less than this over a whole run stays where it starts, at 0."""
TRIAL = 10
"""Steps below which a run is a trial."""
COLDEST, HOTTEST = 0.1, 2.0
"""Temperatures between which responses to a prompt differ and are still text. Recipes have 0.8 to 1.5."""
FEWEST_BETA, MOST_BETA = 1e-4, 100.0
"""Strengths of the pull to the reference in DPO, KTO and relatives; papers have 0.001 (ORPO) to 10 (SimPO)."""
FORGOTTEN = 0.01
"""Share of a score that the discount leaves for the first token of a response of mean length, below which beginnings learn
nothing."""
ENTROPY_COEF = 1.0
"""Advantages have a standard deviation of about 1, and entropies of text are about 1 nat: a bonus at this price is worth as
much as the reward."""
FULL = 0.9
"""Share of the memory that a plan may fill: it may be a tenth off."""

# The policy --------------------------------------------------------------------------------------------------------------

ROUNDING, HALF_ROUNDING = 1e-3, 0.05
"""Nats that two passes over the same tokens may differ by on average, in float32 and in half precision: docs/metrics.md has
1e-5 in float32 and 0.02 in bfloat16 as healthy. Beyond, noise is what is clipped."""
FAR_REFERENCE = 1.0
"""Nats. A reference that was named on purpose is another model, but one at this distance does not write such texts at all."""
MISMATCH, LARGE_MISMATCH = 0.05, 0.5
"""Mean difference, in nats, of a token's log-prob under sampler and policy before the first step: docs/metrics.md has 0.02
as healthy in bfloat16. From 0.5 on the ratios of tokens are off by a factor of 1.6 on average, so other weights have
sampled."""
MISMATCH_TIMES, MISMATCH_LEAST, MISMATCH_MOST, MISMATCH_STEPS = 10.0, 1e-3, 0.3, 3
"""The same in a run: so many times that of the first step and at least so large; or this large anyway."""
UNLIKELY = 1.0
"""Nats per token by which text may be less likely than a uniform guess. A random model is at 0.2 at most, and a trained one
below 0; one that reads other token ids than it was trained with is far above."""
EXPLORES = 1e-3
"""Nats per token of sampled text below which a policy writes the same response each time."""
STEP_SHARE = 1e-3
"""Of the learning rate. Adam's first step moves each weight with a gradient by the rate itself."""
APPROX_KL = 0.05
"""Nats that the updates of a step move the policy by, at most, in a healthy run."""
CLIPPED = 0.3
"""Share of tokens whose ratio is clipped, at most, in a healthy run."""
EFFECTIVE = 0.9
"""Effective share of the samples, at least, in a healthy run."""
RATIO = 4.0
"""The largest probability ratio of a step in a healthy run."""
TAIL, TAIL_STEPS = 20.0, 2
"""The largest probability ratio of a step, in each of so many steps, at which a run warns."""
COLLAPSE, COLLAPSE_STEPS = 0.1, 5
"""The entropy is this share of that of the first steps, or less, in each of so many steps."""
KL_STEPS = 3
"""KL is above a limit in so many steps in a row: that of one step is a noisy estimate."""
KL_MOST, KL_PER_TOKEN = 20.0, 0.5
"""Without a limit of the settings: nats per response, and per token of the mean response; both must be exceeded for a
warning. A curve leaves its healthy band at the first."""
REFERENCE_SHARE, REFERENCE_STEPS = 0.01, 10
"""KL to the reference is this share, or less, of what the updates moved the policy by, over so many steps."""

# The critic --------------------------------------------------------------------------------------------------------------

EXPLAINED = 0.0
"""Share of the variance of Monte Carlo returns that a healthy critic explains at least: less is worse than a constant."""
DEAD, DEAD_STEPS, DEAD_AFTER = 0.02, 20, 30
"""The critic explains no more than this share of the returns' variance, in each of so many steps, after so many."""
DIVERGES, DIVERGES_STEPS = -1.0, 5
"""The critic's error has twice the variance of the returns, in each of so many steps."""

# Scores ------------------------------------------------------------------------------------------------------------------

SAMPLES = 64
"""Responses that the doctor has sampled and scored. A correlation of 0.95 in them is at least 0.92 in all that the policy
writes (95 % interval, Fisher's z), and a reward that fails on 1 response in 20 fails on at least one of them with 96 %."""
FEWEST = 16
"""Scores below which nothing is said of their distribution."""
LENGTH_ALONE = 0.95
"""Rank correlation from which on length explains nine tenths of the order (0.95 squared)."""
SPACE_SIZE = 1.0
"""White space that moves scores by as much as responses differ among themselves decides as much as they do."""
SCALE = 1e3
"""Mean or standard deviation of scores above which a value head, which starts at 0, does not get there at its rate."""
RANDOM = 0.5
"""Two calls of a reward on the same responses that differ by this share of the scores' spread are mostly noise."""
CHANCE, ERRORS = 0.5, 1.64
"""Accuracy of a reward model that guesses, and the standard errors above it up to which one may be guessing (95 %)."""
MEASURED_ON = 100
"""Held-out prompts below which nothing is said of a reward model's accuracy."""
SLOW_SHARE, SLOW_SECONDS = 0.5, 5.0
"""Of a step, and at least so many seconds of it: below that nobody waits for a reward."""
TIED, TIED_STEPS = 0.9, 3
"""Mean share of prompts whose responses tie, over so many steps."""
JUMP, JUMP_AFTER = 10.0, 5
"""The root mean square of the scores is this many times the largest so far, after so many steps."""
JUDGE_EVALUATIONS, JUDGE_SHARE = 3, 0.2
"""Evaluations in a row in which the judge falls, by this share of its range so far at least."""

# Updates -----------------------------------------------------------------------------------------------------------------

SKIPPED, SKIPPED_OF = 6, 10
"""Steps with an update that was left out, of so many."""
LIGHT, LIGHT_STEPS = 0.1, 2
"""Mean importance weight, in each of so many steps."""
STILL, STILL_STEPS = 0.01, 10
"""Mean KL to the reference over the last so many steps, in nats per response."""
FALL, FALL_ERRORS, FALL_STEPS = 0.2, 6.0, 8
"""The scores of the last so many steps are lower than those of the first by this share of their standard deviation (the
larger of the two), and by so many standard errors, which the means of the steps tell."""
CHOSEN_NATS, CHOSEN_STEPS = 50.0, 10
"""DPO's chosen responses have become less likely by so many nats, in each of so many steps."""
