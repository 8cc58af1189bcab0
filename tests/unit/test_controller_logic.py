"""The controller over ranks that are plain objects: real gates and ledgers, no Ray, no SGLang."""

import asyncio
import contextlib
import functools
import math

import pytest

from overstory.orchestrator import controller as module
from overstory.orchestrator.controller import Controller
from overstory.orchestrator.lease import Command
from overstory.orchestrator.rank_directory import RankGone
from overstory.orchestrator.spec import ControlSpec
from overstory.workers import digest
from overstory.workers.digest import DigestChain, LinkFacts, Stretch
from overstory.workers.gate import StepGate

DEADLINE_S = 10.0
ALIKE = (1, 1)  # free slots


def in_loop(test):
    """Runs an async test in an event loop of its own."""

    @functools.wraps(test)
    def run(*arguments, **named):
        asyncio.run(test(*arguments, **named))

    return run


class FakeReplica:
    """Two ranks in one object, stepped by hand."""

    def __init__(self, phase="serving"):
        self.gates = [StepGate(rank, math.inf, self._begin(rank)) for rank in (0, 1)]
        self.chains = [DigestChain(), DigestChain()]
        self.results = [{}, {}]
        self.policies = ["plain", "plain"]
        self.phase = phase
        self.forwards = 0
        self.ended = None
        self.gone = False
        self.room = {"plain", "chain", "tree-7"}
        self.step_between_reports = False
        self.slow = {}
        self.slow_but_done = set()

    def launched(self):
        return self.forwards

    def running_at(self):
        return self.forwards

    def idle(self):
        return False

    def drain(self):
        pass

    def step(self, free_slots=ALIKE):
        """One iteration with a batch on both ranks; False if the gate would wait."""
        view, seen = self.gates[0].view(), self.gates[0]._launched
        left = view.remaining - (self.forwards - seen)
        if view.mode != "unmanaged" and left <= 0 and not view.queued:
            return False
        begins = self.gates[0].before_pull(self)
        for gate in self.gates:
            gate.after_broadcast(list(begins), self)
        self.forwards += 1
        for chain, free in zip(self.chains, free_slots, strict=True):
            chain.add(LinkFacts([self.forwards], [], [Stretch(0, "plain", ())], [], free))
        return True

    def _begin(self, rank):
        def begin(lease):
            self.policies[rank] = lease.policy
            for command in lease.commands:
                self.results[rank][command.ticket] = (rank, command.name)

        return begin

    def report(self, rank, after):
        if self.step_between_reports:
            self.step()
        return {
            **self.gates[rank].counters(),
            "rank": rank,
            "pid": rank,
            "phase": self.phase,
            "forwards": self.forwards,
            "policy": self.policies[rank],
            "lease": vars(self.gates[0].view()) if rank == 0 else None,
            "load": {"running": 1, "waiting": 0},
            "steps": {"verify": {}, "prefill": {}},
            "digests": self.chains[rank].after(after),
            "commands": dict(self.results[rank]),
        }

    async def call(self, rank, method, *arguments):
        if self.gone:
            raise RankGone("it is gone")
        if self.slow.get(method, 0) > 0:
            self.slow[method] -= 1
            if method in self.slow_but_done:
                self._obey(method, arguments)
            raise TimeoutError(f"no answer to {method}")
        if method == "end":
            self.ended, self.gone = (rank, *arguments), True
            raise RankGone("it ends")
        if method == "report":
            return self.report(rank, *arguments)
        if method == "exchange":
            after, every, wait_s = arguments
            await asyncio.to_thread(self.gates[0].await_due, min(wait_s, 0.05), after, every)
            return self.report(rank, after)
        if method == "check_policy":
            if arguments[0] not in self.room:
                raise ValueError(f"no room for {arguments[0]}")
            return None
        if method == "check_command":
            return None
        if method == "step_facts":
            return self.chains[rank].facts(*arguments)
        assert rank == 0
        return self._obey(method, arguments)

    def _obey(self, method, arguments):
        return getattr(self.gates[0], {"grant": "offer"}.get(method, method))(*arguments)


class FakeRanks:
    def __init__(self, **replicas):
        self.all = replicas

    async def replicas(self):
        return {name: 2 for name, replica in self.all.items() if not replica.gone}

    async def call(self, replica, rank, method, *arguments, timeout_s):
        return await self.all[replica].call(rank, method, *arguments)

    def forget(self, replica):
        pass


async def until(predicate, what):
    async with asyncio.timeout(DEADLINE_S):
        while not (found := predicate()):
            await asyncio.sleep(0.005)
    assert found, what
    return found


@contextlib.asynccontextmanager
async def controlling(lease_steps=4, in_charge=None, on_report=lambda _: None, **replicas):
    control = ControlSpec(lease_steps=lease_steps, lease_s=0)
    controller = Controller(
        "demo", control, FakeRanks(**replicas), in_charge=in_charge, on_report=on_report
    )
    controller.start()
    try:
        yield controller
    finally:
        await controller.close()


def leased(replica):
    return lambda: replica.gates[0].view().mode == "leased"


async def lead(replica, steps):
    """Steps the replica as leases allow, until it has launched so many batches more."""
    goal = replica.forwards + steps
    async with asyncio.timeout(DEADLINE_S):
        while replica.forwards < goal:
            if not replica.step():
                await asyncio.sleep(0.001)


@in_loop
async def test_a_replica_found_by_name_is_leased_and_stays_so():
    replica = FakeReplica()
    async with controlling(r1=replica):
        await until(lambda: replica.gates[0].view().queued, "a first lease")
        await lead(replica, 40)
        assert replica.gates[0].view().lapses == 0
        assert replica.gates[1].counters()["seq"] >= 9, "the other rank follows"


@in_loop
async def test_a_report_of_a_rank_is_a_sign_of_life_of_its_replica():
    replica, heard = FakeReplica(), []
    async with controlling(on_report=heard.append, r1=replica):
        await until(lambda: replica.gates[0].view().queued, "a first lease")
        await lead(replica, 8)
        await until(lambda: heard, "a report")
        assert set(heard) == {"r1"}


@in_loop
async def test_a_replica_that_does_not_serve_yet_is_waited_for(monkeypatch):
    monkeypatch.setattr(module, "RETRY_S", 0.01)
    replica = FakeReplica(phase="weights")
    async with controlling(r1=replica) as controller:
        await asyncio.sleep(0.05)
        assert replica.gates[0].view().epoch == 0
        replica.phase = "serving"
        await until(lambda: replica.gates[0].view().queued, "a lease")
        status = await controller.status()
        assert status["replicas"][0]["phase"] == "leased"


@in_loop
async def test_a_policy_takes_effect_at_the_next_boundary_of_all_ranks():
    replica = FakeReplica()
    async with controlling(lease_steps=1000, r1=replica) as controller:
        await until(lambda: replica.gates[0].view().queued, "a lease")
        await lead(replica, 3)
        await controller.set_policy("tree-7")
        await until(lambda: replica.gates[0].view().queued, "the superseding lease")
        await lead(replica, 1)
        assert replica.policies == ["tree-7", "tree-7"]


@in_loop
async def test_a_policy_without_room_is_refused_and_changes_nothing():
    replica = FakeReplica()
    async with controlling(r1=replica) as controller:
        await until(lambda: replica.gates[0].view().queued, "a lease")
        with pytest.raises(ValueError, match="no room for tree-63"):
            await controller.set_policy("tree-63")
        await lead(replica, 12)
        assert replica.policies == ["plain", "plain"]


@in_loop
async def test_a_command_is_carried_out_on_all_ranks_and_answered():
    replica = FakeReplica()
    async with controlling(lease_steps=1000, r1=replica) as controller:
        await until(lambda: replica.gates[0].view().queued, "a lease")
        await lead(replica, 1)
        task = asyncio.create_task(controller.run_command(Command("standing")))
        await until(lambda: replica.gates[0].view().queued, "the command's lease")
        await lead(replica, 1)
        assert await task == {"r1": {0: (0, "standing"), 1: (1, "standing")}}
        with pytest.raises(ValueError, match="no replica 'other'"):
            await controller.run_command(Command("standing"), "other")


@in_loop
async def test_ranks_that_differ_are_caught_within_one_lease_and_named():
    replica = FakeReplica()
    async with controlling(lease_steps=8, r1=replica) as controller:
        await until(lambda: replica.gates[0].view().queued, "a lease")
        await lead(replica, 5)
        replica.step((1, 2))
        wrong = replica.forwards
        while not replica.ended and replica.forwards < wrong + 8:
            replica.step()
            await asyncio.sleep(0.02)
        await until(lambda: replica.ended, "the end of the rank to blame")
        rank, cause, _code = replica.ended
        assert rank == 1
        assert f"ranks 0 and 1 differ at forward {wrong}: free KV slots 1 and 2" in cause
        status = await controller.status()
        assert status["replicas"][0]["phase"] == "lost"
        assert status["replicas"][0]["reason"] == cause


@in_loop
async def test_a_second_controller_takes_over_with_a_larger_epoch_and_the_first_stops():
    replica = FakeReplica()
    async with controlling(r1=replica) as first:
        await until(lambda: replica.gates[0].view().queued, "a lease of the first")
        await lead(replica, 2)
        async with controlling(r1=replica):
            await until(lambda: replica.gates[0].view().epoch == 2, "the second has attached")
            await lead(replica, 20)
            assert replica.gates[0].view().epoch == 2
            status = await until_status(first, "replaced")
            assert "epoch 1 is over" in status["replicas"][0]["reason"]


@in_loop
@pytest.mark.parametrize("in_charge", [True, False])
async def test_a_dead_controllers_late_attach_does_not_leave_the_replica_to_nobody(
    monkeypatch, in_charge
):
    monkeypatch.setattr(module, "DISCOVERY_S", 0.02)
    replica = FakeReplica()

    asked = []

    async def answer():
        asked.append(in_charge)
        return in_charge

    async with controlling(in_charge=answer, r1=replica) as controller:
        await lead_when_leased(replica, 1)
        late = replica.gates[0].attach("dead by now")
        if not in_charge:
            await until(lambda: [replica.step(), len(asked) > 2][1], "three looks at who it is")
            assert (await controller.status())["replicas"][0]["phase"] == "replaced"
            assert replica.gates[0].view().epoch == late
            return
        await until(lambda: [replica.step(), replica.gates[0].view().epoch > late][1], "its return")
        await lead(replica, 20)
        await until_status(controller, "leased")


async def until_status(controller, phase):
    async with asyncio.timeout(DEADLINE_S):
        while True:
            status = await controller.status()
            if status["replicas"][0]["phase"] == phase:
                return status
            await asyncio.sleep(0.01)


@in_loop
async def test_a_lost_replica_is_reported_and_a_new_one_is_followed(monkeypatch):
    monkeypatch.setattr(module, "DISCOVERY_S", 0.02)
    old, new = FakeReplica(), FakeReplica()
    async with controlling(old=old) as controller:
        await until(lambda: old.gates[0].view().queued, "a lease")
        old.gone = True
        status = await until_status(controller, "lost")
        assert "it is gone" in status["replicas"][0]["reason"]
        controller._ranks.all["new"] = new
        await until(lambda: new.gates[0].view().queued, "a lease of the new one")


@in_loop
async def test_closing_lets_replicas_run_freely_at_once():
    replica = FakeReplica()
    async with controlling(r1=replica):
        await until(lambda: replica.gates[0].view().queued, "a lease")
        await lead(replica, 2)
    assert replica.gates[0].view().mode == "unmanaged"
    assert replica.step()


@in_loop
async def test_a_controller_that_comes_late_harms_no_replica_older_than_its_links(monkeypatch):
    monkeypatch.setattr(digest, "LINKS_KEPT", 8)
    replica = FakeReplica()
    for _ in range(30):
        replica.step()
    replica.step_between_reports = True
    async with controlling(lease_steps=1000, r1=replica) as controller:
        await until(lambda: replica.gates[0].view().mode == "leased", "a lease")
        for _ in range(5):
            status = await controller.status()
        (record,) = status["replicas"]
        assert record["phase"] == "leased", record["reason"]
        assert record["digests_equal_up_to"] > 30
        assert replica.ended is None


@in_loop
@pytest.mark.parametrize("method", ["report", "attach", "grant"])
@pytest.mark.parametrize("done", [False, True])
async def test_a_slow_control_call_does_not_drop_the_replica(monkeypatch, method, done):
    monkeypatch.setattr(module, "RETRY_S", 0.01)
    replica = FakeReplica()
    replica.slow = {method: 3}
    if done and method != "report":
        replica.slow_but_done = {method}
    async with controlling(r1=replica) as controller:
        await lead_when_leased(replica, 20)
        (record,) = (await controller.status())["replicas"]
        assert (record["phase"], record["reason"]) == ("leased", "")


async def lead_when_leased(replica, steps):
    await until(lambda: not any(replica.slow.values()), "the slow calls")
    await until(lambda: replica.gates[0].view().queued, "a lease")
    await lead(replica, steps)


@in_loop
@pytest.mark.parametrize("done", [False, True])
async def test_a_command_in_an_unanswered_grant_is_not_lost(monkeypatch, done):
    monkeypatch.setattr(module, "RETRY_S", 0.01)
    replica = FakeReplica()
    async with controlling(lease_steps=1000, r1=replica) as controller:
        await lead_when_leased(replica, 1)
        replica.slow = {"grant": 1}
        replica.slow_but_done = {"grant"} if done else set()
        task = asyncio.create_task(controller.run_command(Command("standing")))
        await until(lambda: replica.slow["grant"] == 0, "the slow grant")
        await until(lambda: replica.step() and task.done(), "the command")
        assert await task == {"r1": {0: (0, "standing"), 1: (1, "standing")}}


@in_loop
async def test_who_attaches_again_does_not_take_over_from_a_newer_controller(monkeypatch):
    monkeypatch.setattr(module, "RETRY_S", 0.01)
    replica = FakeReplica()
    async with controlling(lease_steps=1000, r1=replica) as first:
        await lead_when_leased(replica, 1)
        replica.slow = {"grant": 1}
        newer = replica.gates[0].attach("newer")
        await first.set_policy("chain")
        await until_status(first, "replaced")
        assert replica.gates[0].view().epoch == newer


@in_loop
async def test_a_replica_taken_for_lost_is_taken_up_again(monkeypatch):
    monkeypatch.setattr(module, "DISCOVERY_S", 0.02)
    replica = FakeReplica()
    async with controlling(r1=replica) as controller:
        await lead_when_leased(replica, 1)
        replica.gone = True
        await until_status(controller, "lost")
        replica.gone = False
        await until_status(controller, "leased")
        assert replica.gates[0].view().epoch == 2


@in_loop
async def test_a_policy_set_while_nothing_is_leased_is_kept_and_said_to_be_open(monkeypatch):
    monkeypatch.setattr(module, "RETRY_S", 0.01)
    replica = FakeReplica(phase="weights")
    async with controlling(r1=replica) as controller:
        await until(lambda: controller._state.awaited(), "the replica to be found")
        with pytest.raises(ValueError, match="no-policy"):
            await controller.set_policy("no-policy")
        answer = await controller.set_policy("tree-7")
        assert (answer["replicas"], answer["awaited"]) == ([], ["r1"])
        assert "not in force yet on r1" in answer["note"]
        with pytest.raises(ValueError, match="no replica is under lease"):
            await controller.run_command(Command("standing"))
        replica.phase = "serving"
        await lead_when_leased(replica, 1)
        assert replica.policies == ["tree-7", "tree-7"]
        answer = await controller.set_policy("chain")
        assert answer == {"policy": "chain", "replicas": ["r1"], "awaited": [], "note": ""}
