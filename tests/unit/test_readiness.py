import asyncio
from collections.abc import Awaitable, Callable

from overstory.orchestrator.readiness import Readiness, ReadinessTimes

QUICK = ReadinessTimes(first_proof=0.2, proof=0.2, retry=0.001, check_every=0.01)


class Replicas:
    """Stands for what readiness asks; `up` says whether it answers."""

    def __init__(self, up: bool) -> None:
        self.up = up
        self.proofs = 0
        self.checks = 0

    async def prove(self) -> None:
        self.proofs += 1
        if not self.up:
            raise ConnectionError("no replica")

    async def check(self) -> None:
        self.checks += 1
        if not self.up:
            raise ConnectionError("gone")


async def _until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not true():
            await asyncio.sleep(0.001)


def _run(replicas: Replicas, story: Callable[[Readiness], Awaitable[None]]) -> None:
    async def scenario() -> None:
        readiness = Readiness(replicas.prove, replicas.check, QUICK)
        watch = asyncio.create_task(readiness.watch())
        try:
            await story(readiness)
        finally:
            watch.cancel()

    asyncio.run(scenario())


def test_ready_only_after_something_was_generated() -> None:
    replicas = Replicas(up=False)

    async def story(readiness: Readiness) -> None:
        assert not readiness.ready
        await _until(lambda: replicas.proofs >= 3)
        assert not readiness.ready
        assert "no replica" in readiness.reason
        replicas.up = True
        await _until(lambda: readiness.ready)

    _run(replicas, story)


def test_a_doubt_is_settled_by_generating_and_does_no_harm_meanwhile() -> None:
    replicas = Replicas(up=True)

    async def story(readiness: Readiness) -> None:
        await _until(lambda: readiness.ready)
        proofs = replicas.proofs
        readiness.doubt("a request failed")
        assert readiness.ready
        await _until(lambda: replicas.proofs > proofs)
        assert readiness.ready

    _run(replicas, story)


def test_a_replica_lost_while_idle_is_noticed() -> None:
    replicas = Replicas(up=True)

    async def story(readiness: Readiness) -> None:
        await _until(lambda: readiness.ready and replicas.checks > 0)
        replicas.up = False
        await _until(lambda: not readiness.ready)
        replicas.up = True
        await _until(lambda: readiness.ready)

    _run(replicas, story)


def test_a_generation_that_hangs_is_no_proof() -> None:
    replicas = Replicas(up=True)

    async def hang() -> None:
        await asyncio.Event().wait()

    async def scenario() -> None:
        readiness = Readiness(hang, replicas.check, QUICK)
        watch = asyncio.create_task(readiness.watch())
        await _until(lambda: "within 0.2 s" in readiness.reason)
        assert not readiness.ready
        watch.cancel()

    asyncio.run(scenario())


class BusyEngine(Replicas):
    """Proofs wait behind requests: once `busy`, they neither end nor fail."""

    def __init__(self) -> None:
        super().__init__(up=True)
        self.busy = False
        self.dropped = 0

    async def prove(self) -> None:
        await super().prove()
        try:
            while self.busy:
                await asyncio.sleep(0.001)
        except asyncio.CancelledError:
            self.dropped += 1
            raise


def test_tokens_of_other_requests_settle_a_doubt_while_the_proof_waits() -> None:
    engine = BusyEngine()

    async def story(readiness: Readiness) -> None:
        await _until(lambda: readiness.ready)
        engine.busy = True
        for rounds in range(1, 4):
            readiness.doubt("one request failed")
            await _until(lambda: engine.proofs == 1 + rounds)  # noqa: B023
            readiness.generated()
            await _until(lambda: engine.dropped == rounds)  # noqa: B023
            checks = engine.checks
            await _until(lambda: engine.checks > checks)  # noqa: B023  # settled: it idles again
            assert readiness.ready

    _run(engine, story)


def test_tokens_from_before_the_doubt_prove_nothing() -> None:
    engine = BusyEngine()

    async def story(readiness: Readiness) -> None:
        await _until(lambda: readiness.ready)
        engine.busy = True
        readiness.generated()
        readiness.doubt("one request failed")
        await _until(lambda: not readiness.ready)

    _run(engine, story)


def test_tokens_after_a_failed_proof_make_ready_at_once() -> None:
    replicas = Replicas(up=False)

    async def story(readiness: Readiness) -> None:
        await _until(lambda: replicas.proofs > 0)
        assert not readiness.ready
        readiness.generated()
        assert readiness.ready
        assert readiness.reason == ""
        checks = replicas.checks
        replicas.up = True
        await _until(lambda: replicas.checks > checks)
        assert readiness.ready

    _run(replicas, story)
