"""The names of ``trl.import_utils`` that scripts of TRL 0.7 import."""

from transformers import is_torch_npu_available as is_npu_available
from transformers import is_torch_xpu_available as is_xpu_available

__all__ = ["is_npu_available", "is_xpu_available"]
