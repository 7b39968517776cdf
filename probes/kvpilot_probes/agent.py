"""Make the pack `builtin/agent` from a seed: rounds of tool calls and their results, then a request to check."""

import json
from collections.abc import Iterator, Sequence
from random import Random

from kvpilot_probes.packs import Message
from kvpilot_probes.results import Task

CALL_TOKENS = 96
_REASONS = ("damaged", "late", "unwanted")
_CARRIERS = ("north", "express", "bicycle")


def _tool(name: str, description: str, **properties: dict[str, object]) -> dict[str, object]:
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {"name": name, "description": description, "parameters": parameters}


_NUMBER: dict[str, object] = {"type": "integer", "description": "Number of the order."}
TOOLS = (
    _tool("get_order", "Return the state of an order.", number=_NUMBER),
    _tool("refund", "Pay an order back.", number=_NUMBER, reason={"type": "string", "enum": [*_REASONS]}),
    _tool("ship", "Send an order again.", number=_NUMBER, carrier={"type": "string", "enum": [*_CARRIERS]}),
)
TOOLS_JSON = json.dumps(TOOLS, separators=(",", ":"))
_LEAD = (
    "You work for a shop. Answer each request with one tool call: a JSON object with name and arguments. "
    "After a result, say in one sentence what it means."
)


def chat(chapter: Sequence[Message] | None, question: str) -> Sequence[Message]:
    """Return a chat: the rounds of tool calls in `chapter` (None for no rounds), then the request `question`."""
    hello = (Message("user", _LEAD), Message("assistant", "I am ready."))
    return [*hello, *(chapter or ()), Message("user", question)]


def rounds(seed: int, many: int) -> Iterator[Sequence[Message]]:
    """Yield chapters of `many` rounds. A round is a request, a call, its result and a sentence about the result."""
    rng = Random(seed)  # noqa: S311 - repeatable texts, nothing secret
    while True:
        yield [message for _ in range(many) for message in _round(rng)]


def _round(rng: Random) -> tuple[Message, ...]:
    request, call = _request(rng)
    days, price = rng.randint(1, 30), rng.randint(5, 900)
    result = {"number": call["arguments"]["number"], "state": rng.choice(("open", "sent", "paid")), "price": price}
    return (
        Message("user", request),
        Message("assistant", json.dumps(call)),
        Message("user", "Result: " + json.dumps({**result, "days": days})),
        Message("assistant", f"Order {result['number']} of {price} crowns is {result['state']} since {days} days."),
    )


def _request(rng: Random) -> tuple[str, dict[str, dict[str, object]]]:
    number, kind = rng.randint(1000, 9999), rng.randrange(len(TOOLS))
    reason, carrier = rng.choice(_REASONS), rng.choice(_CARRIERS)
    request, more = (
        (f"What is the state of order {number}?", {}),
        (f"Refund order {number}, because it is {reason}.", {"reason": reason}),
        (f"Ship order {number} again with the carrier {carrier}.", {"carrier": carrier}),
    )[kind]
    call: dict[str, object] = {"name": TOOLS[kind]["name"], "arguments": {"number": number, **more}}
    return request, call  # type: ignore[return-value]


def decisive(seed: int, many: int) -> list[tuple[str, Task]]:
    """Return `many` requests for the end of the chat. With each comes the task to answer it by the right tool call."""
    rng = Random(seed)  # noqa: S311 - repeatable texts, nothing secret
    found = []
    for _ in range(many):
        request, call = _request(rng)
        schema = next(tool["parameters"] for tool in TOOLS if tool["name"] == call["name"])
        found.append((request, Task("call", json.dumps({**call, "schema": schema}), CALL_TOKENS)))
    return found
