"""For any images and chunks, `prefix_lm` finds the image tokens of a step and the later tokens that they see."""

from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

from kvpilot_runtime.backends.prefix_lm import later_tokens, spans

lengths = st.lists(st.integers(1, 9), min_size=1, max_size=4)


@st.composite
def prompts(draw: st.DrawFn) -> tuple[list[tuple[int, int]], int, int]:
    """Draw a prompt's images (first and last token), the tokens before a chunk, and the tokens of the chunk."""
    images, at = [], 0
    for length in draw(lengths):
        first = at + draw(st.integers(0, 4))
        at = first + length
        images.append((first, at - 1))
    context = draw(st.integers(0, at + 3))
    return images, context, draw(st.integers(1, at + 5))


@given(st.lists(prompts(), min_size=1, max_size=4))
def test_two_new_tokens_are_in_one_span_exactly_if_they_are_in_one_image(
    batch: list[tuple[list[tuple[int, int]], int, int]],
) -> None:
    common = SimpleNamespace(mm_req_doc_ranges={i: images for i, (images, _, _) in enumerate(batch)})
    found = spans(common, [(i, context, new) for i, (_, context, new) in enumerate(batch)])
    assert all(found.values())
    for i, (images, context, new) in enumerate(batch):
        own = {(a, b) for begin, end in found.get(i, []) for a in range(begin, end) for b in range(a + 1, end)}
        assert own == {(a, b) for a in range(new) for b in range(a + 1, new)
                       for first, last in images if first <= context + a and context + b <= last}  # fmt: skip


def test_a_batch_without_images_has_no_spans() -> None:
    assert spans(SimpleNamespace(mm_req_doc_ranges=None), [(0, 0, 9)]) == {}


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50), st.integers(2, 9)), min_size=1, max_size=4))
def test_reversed_causal_attention_reaches_exactly_the_later_tokens_of_the_image(
    rows: list[tuple[int, int, int]],
) -> None:
    found = later_tokens(rows)
    assert found.longest == max(tokens for _, _, tokens in rows) - 1
    for i, (query, key, tokens) in enumerate(rows):
        part = slice(int(found.starts[i]), int(found.starts[i + 1]))
        queries, keys = found.queries[part].tolist(), found.keys[part].tolist()
        seen = {(q - query, k - key) for at, q in enumerate(queries) for k in keys[: at + 1]}
        assert seen == {(a, b) for a in range(tokens) for b in range(a + 1, tokens)}
    assert int(found.starts[-1]) == len(found.queries) == len(found.keys)
