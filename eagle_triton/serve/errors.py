"""Errors that the server answers with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class RequestError(Exception):
    """A request that is refused or has failed. param: the wrong field."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        """OpenAI's error body."""
        kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
        kind = "server_error" if self.status >= 500 else kinds.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


class FieldError(RequestError):
    """A body with a wrong field. what: follows the field's name in the message."""

    def __init__(self, param: str, what: str) -> None:
        super().__init__(400, f"{param} {what}", param)
