"""Check that an engine's answers match attention with a recent window, for any schedule of its requests."""

from kvpilot_smallmodels.oracle import SLACK, Oracle
from support.stepped_engine import Asked, Told


class Judge:
    """Check of every answer against plain transformers. It tracks the content of an engine's blocks, step by step.

    For each slot of a block it records the position at which the recent window's ring begins for the slot's token, or
    None if a prefill computed the token. Another request may reuse that token, even after its block was in host memory.

    Attributes:
        wrong: requests with wrong tokens, and the judged part of their answers.
        judged: number of compared tokens.
        windowed: number of decode steps that read the window, counted for each sequence.
        preempted: number of restarts.

    Args:
        rounds: number of passes of `Oracle.sound` for each strength of jitter; 0 allows no rounding.
    """

    def __init__(self, question: Asked, told: Told, oracle: Oracle, rounds: int = 20) -> None:
        self.oracle, self.rounds = oracle, rounds
        self.prompts = [p for round_ in question.rounds for p in round_]
        self.answers = [a for round_ in told.answers for a in round_]
        self.wrong: list[tuple[int, slice]] = []
        self.judged = self.windowed = self.preempted = 0
        size, blocks = told.block_size, dict[tuple[int, int], int | None]()
        runs: dict[int, tuple[int, list[int]]] = {}  # by request: first computed position, and known tokens
        rings: dict[int, list[int | None]] = {}
        host: dict[tuple[int, int], int | None] = {}
        for step in told.steps:
            for block, place in step.get("stored", ()):
                host |= {(place, i): blocks.get((block, i)) for i in range(size)}  # a prompt may end inside a block
            for block, place in step.get("loaded", ()):
                blocks |= {(block, i): host[place, i] for i in range(size)}
            if "request" not in step:
                continue
            request, begin, end = step["request"], step["begin"], step["begin"] + step["tokens"]
            if step["anew"]:
                if request in runs:
                    self.preempted += 1
                    self.judge(request, runs[request][1], rings[request])
                runs[request] = begin, []
            first, given = runs[request]
            # A decode step (one token and its drafts) reads the window. The ring has the tokens that were stored since
            # the request started or restarted.
            prompt, drafts = len(self.prompts[request]), question.drafts
            decodes = step["tokens"] == 1 or (step["tokens"] <= 1 + drafts and begin >= prompt)
            for at in range(begin, end):
                blocks[step["table"][at // size], at % size] = first if decodes else None
            self.windowed += decodes
            # Only the answer token after the step's first token is certain, because drafts may be rejected.
            if end >= prompt:
                given.append(begin + 1 - prompt if decodes else end - prompt)
            rings[request] = [blocks[step["table"][at // size], at % size] for at in range(end)]
        for request, (_, given) in runs.items():
            self.judge(request, [*given[:1], len(self.answers[request]) - 1], rings[request])

    def judge(self, request: int, given: list[int], rings: list[int | None]) -> None:
        """Judge the tokens between two restarts of a request. A client that left early got fewer tokens.

        Args:
            request: the request's number over all rounds.
            given: indices of answer tokens; the tokens from the first to the last are judged.
            rings: for each position, the first token in the ring, as in `Oracle.shortfalls`.
        """
        prompt, answer = self.prompts[request], self.answers[request]
        if not given or given[0] >= len(answer):
            return
        judged = slice(given[0], min(given[-1] + 1, len(answer)))
        self.judged += judged.stop - judged.start
        below = self.oracle.shortfalls(prompt, answer, rings=rings)[judged]
        if max(below) > SLACK and not (
            self.rounds and self.oracle.sound(prompt, answer, rings=rings, judged=judged, rounds=self.rounds)
        ):
            self.wrong.append((request, judged))
