"""Turn text on disk into records: read a file, check every record, split by prompt, visit records in a restorable order.

Importing this package loads neither torch nor the libraries for reading files.
"""

from heedful.data.readers import Record, parse_columns, read_records
from heedful.data.schemas import read_demonstrations, read_labelled, read_prompts, read_rankings
from heedful.data.splits import BatchOrder, prompt_key, split_by_prompt

__all__ = [
    "BatchOrder",
    "Record",
    "parse_columns",
    "prompt_key",
    "read_demonstrations",
    "read_labelled",
    "read_prompts",
    "read_rankings",
    "read_records",
    "split_by_prompt",
]
