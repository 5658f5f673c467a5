"""How answers are written."""

import json
from typing import Any

from starlette.responses import JSONResponse


class Json(JSONResponse):
    """JSON with text as it is; what is no JSON is a mistake of ours."""

    def render(self, content: Any) -> bytes:
        return json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
