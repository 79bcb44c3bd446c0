"""Errors in OpenAI's form, and the parsing of JSON bodies into them."""

import json
import re
from typing import Any, NoReturn

from pydantic import ValidationError

SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")


class ApiError(Exception):
    """A failure as the client sees it: HTTP status and the body in OpenAI's form.

    param: the field at fault, in the form ``messages[0].content``; None when it is no field's.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        type: str = "invalid_request_error",
        code: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.error = {"message": message, "type": type, "param": param, "code": code}

    def body(self) -> dict[str, Any]:
        return {"error": self.error}


def bad_request(param: str | None, message: str) -> ApiError:
    """A 400 whose message starts with the field's name."""
    return ApiError(400, f"{param}: {message}" if param else message, param=param)


def unavailable(reason: str) -> ApiError:
    """A 503: the engine is dead or on its way down."""
    return ApiError(503, reason, type="service_unavailable", code="engine_unavailable")


def internal_error() -> ApiError:
    """A 500 for a fault of ours; the log has the details and the client gets none of them."""
    return ApiError(500, "internal error; the log of the service says more", type="server_error")


def parse_json(body: bytes) -> Any:
    """The value of a JSON document in UTF-8; ApiError 400 when it is not one.

    Refuses what Python's parser would let through: NaN, Infinity, and half of a surrogate pair.
    """
    try:
        value = json.loads(body.decode("utf-8"), parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise bad_request(None, f"the body is not valid UTF-8: {error}") from None
    except (ValueError, RecursionError) as error:
        raise bad_request(None, f"the body is not valid JSON: {error}") from None
    if SURROGATE_ESCAPE.search(body):
        _refuse_surrogates(value)
    return value


def from_validation(error: ValidationError) -> ApiError:
    """All problems in one message; ``param`` is the first one's field."""
    problems = error.errors(include_url=False, include_input=False, include_context=False)
    fields = [_field_name(problem["loc"]) for problem in problems]
    messages = [_message(problem["type"], problem["msg"]) for problem in problems]
    text = "; ".join(f"{field}: {message}" for field, message in zip(fields, messages, strict=True))
    code = "unknown_field" if problems[0]["type"] == "extra_forbidden" else None
    return ApiError(400, text, param=fields[0], code=code)


def _field_name(loc: tuple[int | str, ...]) -> str:
    """``("messages", 0, "content")`` as ``messages[0].content``."""
    parts = [f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc]
    return "".join(parts).removeprefix(".")


def _message(kind: str, message: str) -> str:
    if kind == "extra_forbidden":
        return "unknown field"
    return message.removeprefix("Value error, ")


def _refuse_surrogates(value: Any) -> None:
    fields = value if isinstance(value, dict) else {None: value}
    for name, item in fields.items():
        try:
            json.dumps([name, item], ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError:
            printable = name and name.encode("ascii", "backslashreplace").decode()
            raise bad_request(
                printable, "holds half of a surrogate pair, which is no text"
            ) from None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON value")
