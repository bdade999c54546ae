"""Placement by lifetime: what lives at the same time never shares memory, and little is wasted."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from frost.workspace import ALIGNMENT, Request, place


@st.composite
def requests(draw: st.DrawFn) -> list[Request]:
    out = []
    for i in range(draw(st.integers(0, 24))):
        first = draw(st.integers(0, 30))  # lifetimes of 1 to 41 steps: brief ones are found by their steps
        out.append(
            Request(
                ("r", i),
                draw(st.sampled_from((0, 1, 255, 256, 257, 1000, 4096, 10**6))),
                first,
                draw(st.integers(first, draw(st.sampled_from((first, first + 2, 40))))),
            )
        )
    return out


def rounded(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


@given(requests())
@settings(max_examples=200, deadline=None, derandomize=True)
def test_no_two_live_regions_overlap(wanted: list[Request]) -> None:
    placed = place(wanted)
    assert set(placed.offsets) == {r.key for r in wanted}
    for i, a in enumerate(wanted):
        at, size = placed.offsets[a.key]
        assert size == a.nbytes and at % ALIGNMENT == 0 and at + rounded(size) <= placed.nbytes
        for b in wanted[i + 1 :]:
            if a.last < b.first or b.last < a.first or not a.nbytes or not b.nbytes:
                continue
            other, other_size = placed.offsets[b.key]
            assert at + size <= other or other + other_size <= at, (a, b)


@given(requests())
@settings(max_examples=100, deadline=None, derandomize=True)
def test_no_larger_than_everything_side_by_side_and_no_smaller_than_what_lives_at_once(
    wanted: list[Request],
) -> None:
    total = place(wanted).nbytes
    assert total <= sum(rounded(r.nbytes) for r in wanted)
    assert total >= max(
        (sum(rounded(r.nbytes) for r in wanted if r.first <= t <= r.last) for t in range(41)), default=0
    )


@given(requests(), st.randoms(use_true_random=False))
@settings(max_examples=50, deadline=None, derandomize=True)
def test_the_order_of_requests_does_not_matter(wanted: list[Request], rng: object) -> None:
    """A plan carved twice, in whatever order, is carved alike."""
    shuffled = list(wanted)
    rng.shuffle(shuffled)  # type: ignore[attr-defined]
    assert place(shuffled) == place(wanted)


def test_a_hole_between_two_lifetimes_is_filled() -> None:
    wanted = [
        Request("a", 1024, 0, 3),
        Request("b", 512, 0, 1),
        Request("c", 512, 2, 3),
        Request("d", 256, 1, 1),
    ]
    placed = place(wanted)
    assert placed.offsets["b"][0] == placed.offsets["c"][0] == 1024
    assert placed.nbytes == 1024 + 512 + 256


def test_nothing_needs_nothing() -> None:
    assert place([]).nbytes == 0 and place([Request("empty", 0, 0, 5)]).offsets == {"empty": (0, 0)}
