"""For whose KV a replica that goes stays."""

from overstory.orchestrator.departures import COMING_S, Departures


class _Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_whose_kv_was_fetched_is_not_waited_for() -> None:
    departures = Departures(10, _Clock())
    departures.left("a", 10)
    departures.left("b", 500)
    assert departures.awaited([]) == ["a", "b"]
    assert departures.awaited(["b", "z"]) == ["a"]
    assert departures.awaited(["a", "b"]) == []


def test_nobody_comes_for_short_ones_or_after_a_while() -> None:
    clock = _Clock()
    departures = Departures(10, clock)
    departures.left("short", 9)
    assert departures.awaited([]) == []
    departures.left("a", 10)
    clock.now += COMING_S - 0.1
    departures.left("b", 10)
    assert departures.awaited([]) == ["a", "b"]
    clock.now += 0.2
    assert departures.awaited([]) == ["b"]
    departures.left("c", 10)
    assert list(departures._left) == ["b", "c"], "a replica that serves for weeks keeps few"
