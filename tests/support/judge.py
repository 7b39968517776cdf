"""Check that an engine's answers match attention with a recent window, for any schedule of its requests."""

from collections.abc import Iterable, Sequence

import torch

from kvpilot_formats import formats
from kvpilot_smallmodels.oracle import SLACK, Oracle
from support.stepped_engine import Asked, Told


class Judge:
    """Check of every answer against plain transformers. It tracks the content of an engine's blocks, step by step.

    For each slot of a block it records which blocks its token's query read with residuals. Another request may reuse
    that token, even after its block was in host memory.

    Attributes:
        wrong: requests with wrong tokens, and the judged part of their answers.
        judged: number of compared tokens.
        windowed: number of decode steps that read residuals, counted for each sequence.
        unrefined: number of decode steps that read a block of the window without residuals.
        preempted: number of restarts.

    Args:
        rounds: number of passes of `Oracle.sound` for each strength of jitter; 0 allows no rounding.
        newest: blocks of the window; None for those that the engine should have.
    """

    def __init__(
        self, question: Asked, told: Told, oracle: Oracle, rounds: int = 20, newest: int | None = None
    ) -> None:
        self.oracle, self.rounds, self.size = oracle, rounds, told.block_size
        self.prompts = [p for round_ in question.rounds for p in round_]
        self.answers = [a for round_ in told.answers for a in round_]
        self.wrong: list[tuple[int, slice]] = []
        self.judged = self.windowed = self.unrefined = self.preempted = 0
        if newest is None:
            newest = newest_blocks(question, told)
        size, blocks = told.block_size, dict[tuple[int, int], tuple[int, ...]]()
        runs: dict[int, tuple[int, list[int]]] = {}  # by request: first computed position, and known tokens
        refined: dict[int, list[tuple[int, ...]]] = {}
        known: dict[int, int] = {}  # by request: tokens that the engine knows at least
        host: dict[tuple[int, int], tuple[int, ...]] = {}
        for step in told.steps:
            for block, place in step.get("stored", ()):
                host |= {(place, i): blocks.get((block, i), ()) for i in range(size)}  # a prompt may end inside a block
            for block, place in step.get("loaded", ()):
                blocks |= {(block, i): host[place, i] for i in range(size)}
            if "request" not in step:
                continue
            request, begin, end = step["request"], step["begin"], step["begin"] + step["tokens"]
            if step["anew"]:
                if request in runs:
                    self.preempted += 1
                    self.judge(request, runs[request][1], refined[request])
                runs[request] = begin, []
            given = runs[request][1]
            # A decode step (one token and its drafts) reads the window.
            prompt, drafts = len(self.prompts[request]), question.drafts
            decodes = step["tokens"] == 1 or (step["tokens"] <= 1 + drafts and begin >= prompt)
            window = range(max(-(-end // size) - newest, 0), -(-end // size)) if decodes else range(0)
            read = tuple(i for i in window if i in step["refined"])
            self.windowed += bool(read)
            self.unrefined += len(read) < len(window)
            blocks |= {(step["table"][at // size], at % size): read for at in range(begin, end)}
            # Only the answer token after the step's first token is certain, because drafts may be rejected. After a
            # restart, the known part of the answer is computed again, and no token is sampled before its end.
            first = begin + 1 if decodes else end
            if first >= known.get(request, prompt):
                given.append(first - prompt)
                known[request] = first + 1
            refined[request] = [blocks[step["table"][at // size], at % size] for at in range(end)]
        for request, (_, given) in runs.items():
            self.judge(request, [*given[:1], len(self.answers[request]) - 1], refined[request])

    def judge(self, request: int, given: list[int], refined: Sequence[Iterable[int]]) -> None:
        """Judge the tokens between two restarts of a request. A client that left early got fewer tokens.

        Args:
            request: the request's number over all rounds.
            given: indices of answer tokens; the tokens from the first to the last are judged.
            refined: for each position, the indices of the blocks that it read with residuals.
        """
        prompt, answer = self.prompts[request], self.answers[request]
        if not given or given[0] >= len(answer):
            return
        judged = slice(given[0], min(given[-1] + 1, len(answer)))
        self.judged += judged.stop - judged.start
        total = len(prompt) + len(answer)
        fine = torch.zeros(total, total, dtype=torch.bool)
        for at, read in enumerate(refined[:total]):  # the last step may have stored drafts after the answer
            for i in read:
                fine[at, i * self.size : min((i + 1) * self.size, at + 1)] = True
        below = self.oracle.shortfalls(prompt, answer, fine=fine)[judged]
        if max(below) > SLACK and not (
            self.rounds and self.oracle.sound(prompt, answer, fine=fine, judged=judged, rounds=self.rounds)
        ):
            self.wrong.append((request, judged))


def newest_blocks(question: Asked, told: Told) -> int:
    """Return how many of a sequence's newest blocks the engine should read with residuals."""
    fmt, context = formats.parse(question.dtype), question.options["max_model_len"]
    if isinstance(question.recent, str):
        return -(-int(context) // told.block_size)
    recent = fmt.recent_tokens(question.recent, context)
    return fmt.recent_blocks(recent, told.block_size)
