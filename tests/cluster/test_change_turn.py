"""Whose turn it is to change a deployment, when several commands ask in the same millisecond."""

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import ray
from leftovers import wait_until

from overstory.orchestrator.change_turn import turn_name, turn_to_change
from overstory.orchestrator.rank_group import NAMESPACE
from overstory.orchestrator.restart_rules import RestartError

ROUNDS, COMMANDS = 4, 4


def free(deployment: str) -> bool:
    try:
        ray.get_actor(turn_name(deployment), namespace=NAMESPACE)
    except ValueError:
        return True
    return False


def test_one_of_several_at_once_gets_the_turn() -> None:
    barrier = threading.Barrier(COMMANDS)

    def command(deployment: str) -> str:
        barrier.wait(30)
        try:
            with turn_to_change(deployment):
                barrier.wait(30)  # All have tried.
                return "had it"
        except RestartError as refusal:
            barrier.wait(30)
            return str(refusal)

    with ThreadPoolExecutor(COMMANDS) as pool:
        for number in range(ROUNDS):
            ends = list(pool.map(command, [f"d{number}"] * COMMANDS))
            assert ends.count("had it") == 1, ends
            assert sum("is being changed already by another" in end for end in ends) == 3
    wait_until(lambda: all(free(f"d{number}") for number in range(ROUNDS)), 30, "turns given back")
    with turn_to_change("d0"), turn_to_change("other"):
        pass


def test_a_command_that_is_killed_gives_its_turn_back(ray_here: str) -> None:
    code = (
        "import ray, sys, time\n"
        "from overstory.orchestrator.change_turn import turn_to_change\n"
        "ray.init(sys.argv[1], namespace='overstory', log_to_driver=False)\n"
        "with turn_to_change('killed'):\n"
        "    print('has it', flush=True)\n"
        "    time.sleep(600)\n"
    )
    command = subprocess.Popen(
        [sys.executable, "-c", code, ray_here], stdout=subprocess.PIPE, text=True
    )
    assert command.stdout is not None
    with command:
        assert command.stdout.readline() == "has it\n"
        with pytest.raises(RestartError, match="being changed already"), turn_to_change("killed"):
            pass
        command.kill()
    wait_until(lambda: free("killed"), 60, "Ray to notice that the command is gone")
    with turn_to_change("killed"):
        pass
