"""Digests that the ranks compare among themselves."""

from __future__ import annotations

from array import array
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from peer_process import CPU, group

from overstory.orchestrator.local_ray import free_port
from overstory.workers.collectives import CollectiveError, Communicator
from overstory.workers.digest import DigestChain, LinkFacts, RequestFacts, Stretch
from overstory.workers.digest_gather import DigestGather
from overstory.workers.gate import RanksDiverged

TWO = SimpleNamespace(world_size=2)


def _gather(comm: Communicator, chain: DigestChain) -> DigestGather:
    """One that has met the other rank already."""
    gather = DigestGather(comm.rank, chain, "tcp", lambda: CPU, lambda: "127.0.0.1")
    gather._communicator = comm
    return gather


def _step(forward: int, token: int) -> LinkFacts:
    request = RequestFacts("r", 0, array("q", [token]), 5, (1, 2))
    return LinkFacts([forward], [1], [Stretch(0, "chain", (0,))], [request], free_slots=7)


def _rank_1(comm: Communicator) -> str:
    chain = DigestChain()
    gather = _gather(comm, chain)
    gather.compare(TWO)
    for token in (3, 4, 9):
        chain.add(_step(token, token))
        try:
            gather.compare(TWO)
        except RanksDiverged as error:
            return str(error)
    return "alike"


def test_a_rank_that_differs_from_rank_0_ends_at_the_boundary() -> None:
    with group(_rank_1) as (comm, peers):
        chain = DigestChain()
        gather = _gather(comm, chain)
        gather.compare(TWO)
        for token in (3, 4, 5):
            chain.add(_step(token if token < 5 else 9, token))
            gather.compare(TWO)
        said = peers[0].result()
        assert said.startswith("rank 1 differs from rank 0 at a boundary: 3 digests ending")
        peers[0].process.join(10)
        with pytest.raises(CollectiveError):
            gather.compare(TWO)


def _met(comm: Communicator, port: int) -> str:
    """As in a rank: it meets the others through the engine's own group."""
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=comm.rank, world_size=2
    )
    engine = SimpleNamespace(world_size=2, ranks=[0, 1], cpu_group=dist.group.WORLD)
    gather = DigestGather(comm.rank, DigestChain(), "tcp", lambda: CPU, lambda: "127.0.0.1")
    try:
        gather.compare(engine)
        first = gather._communicator
        gather.compare(engine)
        assert gather._communicator is first
        assert first is not None
        return first.name
    finally:
        gather.close()
        dist.destroy_process_group()


def test_the_ranks_meet_through_the_engines_group() -> None:
    port = free_port()
    with group(lambda comm: _met(comm, port)) as (comm, peers):
        name = _met(comm, port)
        assert name.startswith("digests-")
        assert peers[0].result() == name


def test_one_rank_compares_nothing() -> None:
    DigestGather(0, DigestChain(), "tcp", lambda: CPU, lambda: "").compare(
        SimpleNamespace(world_size=1)
    )


def test_the_head_tells_chains_apart() -> None:
    chain = DigestChain()
    assert chain.head() == (0, 0)
    chain.add(_step(3, 3))
    first = chain.head()
    chain.add(_step(3, 3))
    assert chain.head()[0] == 2
    assert chain.head()[1] != first[1]
    assert -(1 << 63) <= first[1] < 1 << 63
